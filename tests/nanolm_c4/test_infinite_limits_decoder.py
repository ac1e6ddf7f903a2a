"""Bordelon, Chaudhry & Pehlevan's decoder: the listing, its numbers, its limits, its config."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml

from nanolm_c4 import cost, train
from nanolm_c4.config import Config
from tests.memory import most_allocated
from training import config as configs
from training import coordinate_check, runs
from training import linear_cross_entropy as losses
from training.config import load, validate
from training.linear_cross_entropy import IGNORE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "nanolm_c4/configs"
LAPTOP, PAPER = FOLDER / "infinite_limits_laptop.yaml", FOLDER / "infinite_limits_paper.yaml"
V, T = 64, 8
ALPHAS = list(itertools.product((1.0, 0.5), (1.0, 0.5)))  # alpha_attention, alpha_depth


def settings(*overrides, head_dim=8, heads=4, layers=2, alphas=(1.0, 1.0), optimizer="adam"):
    """The laptop's config at another size, with a vocabulary of 64 and rows of 8 tokens."""
    words = (
        f"model.head_dim={head_dim} model.heads={heads} model.layers={layers} model.vocab_size={V} "
        f"model.context={T} optimizer.name={optimizer} prescription.alpha_attention={alphas[0]} "
        f"prescription.alpha_depth={alphas[1]}"
    )
    return load(Config, LAPTOP, [*words.split(), *overrides])


def build(config, seed=0, dtype=torch.float64):
    """The config's decoder as a run starts from it, and its plan."""
    decoder = train.build_model(config, cost.vocabulary(config)).to(dtype)
    plan = train.build_plan(config, decoder)
    plan.initialise(decoder, seed)
    return decoder, plan


def with_readout(decoder, seed=1):
    """The same after a drawn step of the readout, which starts at zero."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in decoder.readout.parameters():
        tensor.data.normal_(generator=generator)
    return decoder


def tokens(rows=3, seed=2, words=V, length=T):
    return torch.randint(0, words, (rows, length), generator=torch.Generator().manual_seed(seed))


def listing(weights, ids, *, N, H, L, alphas, beta0, gamma0, adam):
    """App. B's language model in numpy, with the multipliers of section 2.1 and Table 2.

    Signs and roots as in the listing, which is for alpha_depth = 1; beta0 keeps its power there, so
    that alpha_depth changes nothing at L = 1. Flax's Dense is x @ W, torch
    keeps W transposed.
    """
    alpha_attention, alpha_depth = alphas
    n, c = N * H, 1.5 - alpha_attention
    first = np.sqrt(n) * L ** (1 - alpha_depth) if adam else beta0**0.5 * L ** (0.5 - alpha_depth)

    def norm(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)

    def dense(x, name):
        return x @ weights[name + ".weight"].T

    def split(x):
        return x.reshape(*x.shape[:2], H, N).transpose(0, 2, 1, 3)

    def attention(x, name):
        q, k = (split(dense(x, name + part) / H**0.5 / N**c) for part in (".query", ".key"))
        v = split(dense(x, name + ".value") / np.sqrt(n))
        exp = np.exp(N**-alpha_attention * q @ k.transpose(0, 1, 3, 2))
        exp = exp * np.tril(np.ones(exp.shape[-2:]))
        out = (exp / exp.sum(-1, keepdims=True)) @ v
        return dense(out.transpose(0, 2, 1, 3).reshape(x.shape), name + ".output") / np.sqrt(n)

    def mlp(x, name):
        h = dense(x, name + ".up") / np.sqrt(n)
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return dense(h, name + ".down") / np.sqrt(n)

    x = weights["token_embedding.weight"][ids] * first
    x = x + weights["position_embedding.weight"][: ids.shape[1]] * first
    for i in range(L):
        for branch, name in ((attention, "attention"), (mlp, "mlp")):
            x = x + beta0 * L**-alpha_depth * branch(norm(x), f"blocks.{i}.{name}")
    return first * (dense(norm(x), "readout") + weights["readout.bias"]) / (gamma0 * n)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("alphas", ALPHAS)
def test_logits_are_those_of_the_papers_listing(alphas, optimizer):
    size = {"head_dim": 4, "heads": 3, "layers": 3}
    config = settings("prescription.beta0=2.5", alphas=alphas, optimizer=optimizer, **size)
    decoder = with_readout(build(config)[0])
    weights = {name: tensor.detach().numpy() for name, tensor in decoder.named_parameters()}
    ids = tokens()
    numbers = {"alphas": alphas, "beta0": 2.5, "gamma0": 0.25, "adam": optimizer == "adam"}
    expected = listing(weights, ids.numpy(), N=4, H=3, L=3, **numbers)
    np.testing.assert_allclose(decoder(ids).detach(), expected, rtol=1e-10, atol=1e-10)


def test_training_starts_from_zero_logits():
    decoder, _ = build(settings())
    ids = tokens()
    assert not decoder(ids).any()
    assert decoder(ids, ids).item() == pytest.approx(ids.numel() * math.log(V), rel=1e-14)


def test_the_fused_loss_has_the_bias_and_its_gradient():
    decoder, ids = with_readout(build(settings())[0]), tokens()
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = IGNORE
    plain = F.cross_entropy(decoder(ids).flatten(0, 1), targets.flatten(), reduction="sum")
    wanted = torch.autograd.grad(plain, list(decoder.parameters()))
    fused = decoder(ids, targets)
    assert fused.item() == pytest.approx(plain.item(), rel=1e-13)
    got = torch.autograd.grad(fused, list(decoder.parameters()))
    for a, b in zip(got, wanted, strict=True):
        assert b.any()
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_the_fused_loss_under_bf16_is_the_same_within_rounding():
    decoder, ids = with_readout(build(settings(), dtype=torch.float32)[0]), tokens()
    expected = decoder(ids, ids)
    with torch.autocast("cpu", torch.bfloat16):
        low = decoder(ids, ids)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, expected, rtol=0.02, atol=0)


def test_the_loss_never_holds_all_logits(monkeypatch):
    words, rows = 4000, 64
    decoder = build(settings(f"model.vocab_size={words}", head_dim=4), dtype=torch.float32)[0]
    ids = tokens(rows, words=words)
    all_logits = 4 * rows * T * words
    fused = most_allocated(lambda: decoder(ids, ids).backward())
    monkeypatch.setitem(losses._CHUNK, "cpu", 16 * words)
    chunked = most_allocated(lambda: decoder(ids, ids).backward())
    assert chunked < 0.5 * all_logits < all_logits < fused


def test_the_coordinate_checks_command_scans_the_heads(texts, tmp_path, no_picture):
    """Two steps: the first moves the readout alone, which starts at zero."""
    words = [*texts, "model.layers=2", "model.context=8"]
    argv = ["nanolm_c4", str(LAPTOP), *words, "--scan", "model.heads", "--widths", "4", "8", "32"]
    coordinate_check.main([*argv, "--steps", "2", "--seeds", "3", "--out", str(tmp_path / "out")])
    found = json.loads((tmp_path / "out/coordinate_check.json").read_text())
    assert found["passed"] and found["scan"] == "model.heads"
    second = {(s["quantity"], s["name"]): s for s in found["slopes"] if s["step"] == 2}
    assert second["update", "blocks.1.attention.key.weight"]["aim"] == pytest.approx(-0.5)
    assert second["change", "blocks.1"]["verdict"] == "ok"
    assert {s["verdict"] for s in found["slopes"]} <= {"ok", "-"}


@pytest.mark.parametrize("path", [LAPTOP, PAPER])
def test_a_saved_config_has_the_rules_own_keys_and_reads_back(path):
    config = load(Config, path)
    saved = yaml.safe_load(configs.to_yaml(config))
    assert validate(Config, saved, "saved") == config
    assert "alignment" not in saved["prescription"]


def test_a_run_is_the_same_run_whether_width_or_heads_is_given():
    by_heads = settings(heads=4, head_dim=8)
    words = f"model.heads=null model.width=32 model.layers=2 model.vocab_size={V} model.context={T}"
    by_width = load(Config, LAPTOP, words.split())
    assert by_width == by_heads and runs.run_id(by_width) == runs.run_id(by_heads)
    assert (by_width.model.heads, by_heads.model.width) == (4, 32)
    assert runs.run_id(by_heads) != runs.run_id(settings(heads=8, head_dim=4))


def test_the_coordinate_checks_default_says_which_size_to_scan(capsys):
    with pytest.raises(SystemExit) as caught:
        coordinate_check.main(["nanolm_c4", str(LAPTOP)])
    error = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and len(error) == 1
    assert error[0].startswith(f"error: {LAPTOP}: ") and "--scan model.heads" in error[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_run_learns(texts, tmp_path, optimizer):
    words = [*texts, "model.vocab_size=null", "training.steps=30"]
    config = settings(*words, optimizer=optimizer)
    summary = train.EXPERIMENT.run(config, tmp_path / "run")
    assert summary["first_train_loss"] == pytest.approx(math.log(80), abs=1e-4)
    assert summary["final_eval_loss"] < math.log(80) - 0.2
    assert summary["parameters"] == train.EXPERIMENT.parameters(config)["total"]
