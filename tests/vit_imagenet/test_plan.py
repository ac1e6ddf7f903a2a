"""Rates of the Vision Transformer and its sweep, against Part II, section 1."""

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from param_groups import Dinan, plan
from sweeps.rules import around
from sweeps.sweep_file import load_sweep
from training.optim import optimizers
from vit_imagenet.config import ModelConfig
from vit_imagenet.model import ROLES, build

N_OUT = 1000
# Published optima (lr*, wd*), section 1E.
OPTIMA = {"standard": (1e-3, 0.8), "neural_tangent": (20.0, 4e-5)}
BULK = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def network(n, layers=12, device="meta"):
    shape = {"patch_size": 16, "image_size": 224, "classes": N_OUT}
    with torch.device(device):
        return build(ModelConfig(width=n, layers=layers, **shape))


def rows(n, prescription, *, layers=2, lr=1.0, wd=0.0):
    """(name of a tensor without its block -> its row) of a planned model on meta."""
    settings = {"lr": lr, "eps": 1e-8, "weight_decay": wd, "decay_mode": "global"}
    planned = plan(network(n, layers), ROLES, prescription, **settings)
    found = {}
    for row in planned.rows:
        name = row.name.removesuffix(".weight").split(".", 2)[-1]
        name = name if row.name.startswith("blocks.") else row.name.removesuffix(".weight")
        assert found.setdefault(name, row).lr == row.lr  # blocks are alike
    return found


def rates(n, prescription, **settings):
    return {name: row.lr for name, row in rows(n, prescription, **settings).items()}


def test_equal_bulk_rates_predict_the_optima_of_the_other_strategies():
    """lr = bulk n^((3 - s) / 2) gives the blocks the same rate at every s.

    The published optima have 9.4e-4 (neural tangent) and 1e-3 (standard) there: hybrid 3.80 or
    4.04, maximal update 0.72 or 0.77. Positions and patchify then agree as well; the head does not.
    """
    predicted = {20 * 768**-1.5: (20.0, 3.799, 0.7217), 1e-3: (21.28, 4.043, 0.768)}
    for bulk, printed in predicted.items():
        lrs = [bulk * 768 ** ((3 - s) / 2) for s in (0, 1 / 2, 1)]
        assert lrs == pytest.approx(printed, rel=2e-4)
        names = ("neural_tangent", "hybrid", "maximal_update")
        found = [rates(768, Dinan(768, name), lr=lr) for name, lr in zip(names, lrs, strict=True)]
        for name in BULK:
            assert [each[name] for each in found] == pytest.approx([bulk] * 3, rel=1e-12)
        for name in ("patch_embed.proj", "pos_embed"):
            assert [each[name] / found[0][name] for each in found] == pytest.approx([1] * 3)
        head = [each["head"] / found[0]["head"] for each in found]
        assert head == pytest.approx([1, 768**-0.25, 768**-0.5])


def test_a_first_step_of_the_papers_model_changes_every_tensor_by_its_rate():
    """ViT-B/16 but for ten of twelve blocks, which are alike: Adam's first step moves an entry by
    its rate times g / (abs(g) + eps)."""
    lr, wd = OPTIMA["neural_tangent"]
    model = network(768, layers=2, device="cpu")
    settings = {"lr": lr, "eps": 1e-8, "weight_decay": wd, "decay_mode": "global"}
    planned = plan(model, ROLES, Dinan(768), **settings)
    planned.initialise(model, seed=0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(1, 3, 224, 224, generator=generator)
    targets = torch.rand(1, N_OUT, generator=generator).softmax(-1)
    loss = F.cross_entropy(model(images), targets)
    loss.backward()
    assert 0.5 * math.log(N_OUT) < loss.item() < 2 * math.log(N_OUT)
    optimizers.build("adam", planned.groups(model), betas=(0.9, 0.999)).step()
    with torch.no_grad():
        for row in planned.rows:
            value, old = model.get_parameter(row.name), before[row.name]
            gradient = value.grad
            moved = (value - (1 - row.decay_per_step) * old).abs_() / row.lr
            expected = gradient.abs() / (gradient.abs() + 1e-8)
            rounding = 2e-7 * (old.abs().max().item() / row.lr + 1)
            assert moved.max().item() <= 1 + rounding, row.name
            assert (moved - expected).abs_().max().item() < 1e-5 + rounding, row.name
            assert moved.median().item() > 0.9, row.name


# The sweep of Figures 1 and 2


ROOT = Path(__file__).resolve().parents[2]
SWEEP = ROOT / "vit_imagenet/sweeps/figure_1_2.yaml"
SWEPT = ["standard", "neural_tangent", "hybrid", "maximal_update"]


@pytest.fixture(params=[None, "laptop"])
def sweep(request, tmp_path):
    return load_sweep(SWEEP, tmp_path, request.param)


def bulk(config):
    """lr lambda of the blocks' matrices, as in the paper's table."""
    s = {"standard": None, "neural_tangent": 0, "hybrid": 0.5, "maximal_update": 1}
    s, n = s[config.prescription.strategy], config.model.width
    return config.optimizer.lr * (1 if s is None else n ** (-1 - (1 - s) / 2))


def test_four_searches_start_at_about_equal_rates_and_equal_decay(sweep):
    assert [point.curve for point in sweep.points] == SWEPT
    for point in sweep.points:
        config = point.config
        assert config.prescription.strategy == point.curve
        assert abs(math.log2(bulk(config) / bulk(sweep.points[0].config))) < 0.55
        decay = config.optimizer.lr * config.optimizer.weight_decay
        first = sweep.points[0].config.optimizer
        assert decay == pytest.approx(first.lr * first.weight_decay)
        assert config.optimizer.decay_mode == "global"


def test_the_rule_is_the_paper_s(sweep):
    rule = sweep.config.confirm
    published = {(2, 1), (1, 2), (2, 0.5), (0.5, 2), (1, 0.5), (0.5, 1)}
    assert set(around((1.0, 1.0), rule.neighbours)) == published
    assert rule.metric == "best_eval_top1" and sweep.config.metrics
    assert rule.seeds == list(range(5 if sweep.folder.name.endswith("_laptop") else 3))
