"""The quickstart on one GPU: its runs, their memory, the script, and the figure in small."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from plots.__main__ import make
from sweeps import cost
from sweeps.__main__ import main
from sweeps.sweep_file import load_sweep
from tests.nanolm_c4.test_data import DOCUMENTS, train_model
from tests.text_files import as_c4
from training.experiment import load_experiment
from training.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "nanolm_c4/sweeps/quickstart.yaml"


@pytest.mark.thorough
def test_forty_runs_of_text_that_two_files_hold_and_a_16_gb_card_steps(tmp_path):
    points = load_sweep(FILE, tmp_path, "one_gpu", draft=True).points
    assert len({point.run for point in points}) == 40
    places = {(p.curve, p.config.model.width, p.config.optimizer.lr) for p in points}
    for curve, top in (("standard_global", -8), ("mup_full", -6)):
        rates = [2.0 ** (top - k) for k in range(5)]
        assert places >= {(curve, w, rate) for w in (128, 256, 512, 1024) for rate in rates}
    config = max((p.config for p in points), key=lambda config: config.model.width)
    assert (config.model.layers, config.model.context, config.training.steps) == (8, 512, 5000)
    tokens = config.training.steps * config.training.batch_size * config.model.context
    assert tokens <= config.data.max_train_tokens < 2 * 150e6  # so many hold two files of C4
    measured = simulate(load_experiment("nanolm_c4"), config).memory
    assert 2e9 < measured * cost.MARGIN + cost.CONTEXT < 16e9


@pytest.mark.parametrize(
    ("capability", "words", "precision"),
    [("8.9", [], ""), ("7.5", ["--quiet"], "training.precision=fp16"), (None, ["--dry-run"], "")],
)
def test_the_script_announces_fetches_tokenises_trains_and_draws(
    tmp_path, capability, words, precision
):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "scripts/environment.sh").write_text(f'cd "{tmp_path}"\n')
    (tmp_path / "scripts/download.sh").write_text('echo download "$@" >>calls\n')
    programs = {"python": 'echo "$@" >>calls', "nvidia-smi": f"echo {capability}"}
    for name, line in programs.items():
        (tmp_path / name).write_text(
            f"#!/bin/sh\n{line if capability or name == 'python' else 'exit 9'}\n"
        )
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", tmp_path / "scripts/one_gpu.sh", *words]
    subprocess.run(command, env=env, check=True)
    sweep = " ".join(["nanolm_c4/sweeps/quickstart.yaml --preset one_gpu", *precision.split()])
    folder = "results/nanolm_c4/" + "+".join(["quickstart_one_gpu", *precision.split()])
    run = " ".join(["-m sweeps run", sweep, *words])
    calls = (tmp_path / "calls").read_text().splitlines()
    before = [f"-m sweeps cost {sweep}", "download c4 --shards 2"]
    before += ["-m nanolm_c4.data nanolm_c4/configs/paper.yaml data.max_train_tokens=164_000_000"]
    drawn = f"-m plots quickstart {folder}/results.csv --out {folder}"
    assert calls == ([run] if "--dry-run" in words else [*before, run, drawn])
    if capability is None:
        ran = subprocess.run(command[:2], env=env, capture_output=True, text=True)
        assert ran.returncode == 2 and "no NVIDIA GPU here" in ran.stderr


@pytest.mark.thorough
def test_a_small_imitation_ends_in_the_figure(tmp_path, monkeypatch):
    """Text in C4's format, two widths of the preset, three rates, models and runs cut short."""
    monkeypatch.chdir(tmp_path)
    as_c4(Path("data/c4"), DOCUMENTS)
    words = (
        "model.layers=1 model.context=16 model.vocab_size=65 training.steps=2 "
        "training.batch_size=2 training.micro_batch_size=null training.eval_samples=2 "
        "training.eval_batch_size=2 training.compile=false training.precision=fp32 "
        "schedule.warmup_steps=1 data.max_train_tokens=1000 data.max_validation_tokens=100 "
    ).split()
    words += [f"data.tokenizer={train_model(tmp_path / 'm')}", f"data.cache_dir={tmp_path / 'c'}"]
    rows = ("model.width<=256", "optimizer.lr>0.0009", "optimizer.lr<0.004")
    words += [word for row in rows for word in ("--where", row)]
    words += ["--results", str(tmp_path / "results"), "--workers", "2", "--threads", "1"]
    main(["run", str(FILE), "--preset", "one_gpu", *words])
    (table,) = tmp_path.glob("results/nanolm_c4/quickstart_one_gpu*/results.csv")
    text, files = make("everett/quickstart", [table], tmp_path / "figure")
    assert "loss at D=256 with the rate of D=128, muP" in text
    assert [path.name for path in files] == ["quickstart.png", "quickstart.pdf"]
