"""The command that prints every prediction, as text and as JSON, and its errors."""

import json

import numpy as np
import pytest

from effective_theory.dinan import predict

_DRAWS = 1024


def _run(capsys, tmp_path, *overrides, text="model:\n  stem: vision\n"):
    path = tmp_path / "theory.yaml"
    path.write_text(text)
    small = ["model.depth=1", f"theory.attention_draws={_DRAWS}"]
    predict.main(["--config", str(path), *small, *overrides])
    return capsys.readouterr().out


def test_the_command_prints_predictions(capsys, tmp_path):
    out = _run(capsys, tmp_path, "model.width=256")
    assert "vision: 2 samples x 4 tokens, n = 256, H = 8, s = 0" in out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert {"stem", "attention.0", "mlp.0", "head"} <= lines.keys()
    assert float(lines["attention.0.query"][1]) == pytest.approx(1 / 256, rel=1e-3)
    single = _run(capsys, tmp_path, "data.samples=1", "data.patch_size=8")
    assert "1 samples x 1 tokens" in single and "nan" not in single


@pytest.mark.parametrize("stem", ["vision", "language"])
def test_the_command_prints_json(capsys, tmp_path, stem):
    text = f"model:\n  stem: {stem}\n  pooling: {str(stem == 'vision').lower()}\n"
    out = json.loads(_run(capsys, tmp_path, "--json", "init.query=0.5", text=text))
    size = 2 if stem == "vision" else 8
    assert out["blocks"] == ["stem", "attention.0", "mlp.0", "head"]
    assert out["config"]["init"]["query"] == 0.5
    for name in ("G", "G_se", "theta", "theta_se"):
        assert np.shape(out[name]["mlp.0"]) == (8, 8)
        assert np.shape(out[name]["head"]) == (size, size)
    assert "head" not in out["F"]
    for kinds in (out["groups"], out["parts"]):
        np.testing.assert_allclose(sum(map(np.array, kinds["head"].values())), out["theta"]["head"])
    assert out["tensors"].keys() == out["parts"]["head"].keys()
    assert ("contact" in out) is (stem == "language")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=3", "model.width 512 is not a multiple of model.heads 3"),
        ("init.qeury=1", "unknown key 'init.qeury'; did you mean 'init.query'?"),
        ("init.mlp_in=4000", "gelu at variance 4e+03: expectations are computed up to 1000; lower"),
        ("init.stem=1.7e308", "G of block stem is beyond float64 with init.stem = 1.7e+308; bring"),
        ("data.tokens=3", "stem vision has (8 / data.patch_size)^2 tokens; leave it at 4"),
        ("data.first=5000", "data.first 5000 and data.samples 2 ask for more than the 1797 digits"),
    ],
)
def test_the_command_explains_mistakes_in_one_line(capsys, tmp_path, override, message):
    with pytest.raises(SystemExit) as stop:
        _run(capsys, tmp_path, override)
    captured = capsys.readouterr()
    assert stop.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_huge_words_are_printed(capsys, tmp_path):
    text = "model:\n  stem: language\n  pooling: false\n"
    out = json.loads(_run(capsys, tmp_path, "--json", "init.stem=1e200", text=text))
    assert np.max(out["contact"]["leading"]) == pytest.approx(512 * 1e200)
