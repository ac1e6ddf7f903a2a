"""What N, H and L do to a network at initialisation and in a step, against the paper's exponents.

One sample of four tokens: an update's alignment with an activation is only seen where there are far
fewer of them than the width. The exponents differ by halves; a measured one may be off by 0.15.
Scans of N at H = 4 and of H at N = 4 go over widths n from 16 to 256.
"""

import functools
import math

import pytest
import torch
from torch.nn import functional as F

from measure import observations
from measure.representations import weight_movement
from param_groups import Bordelon, plan
from param_groups.check.measuring import Check, measure
from training.optim import optimizers
from vit_cifar5m.config import ModelConfig
from vit_cifar5m.model import ROLES, VisionTransformer

SEEDS, TOLERANCE = 4, 0.15
# Below n = 128 the change of the logits in a step of Adam still falls: over N by n^(-0.13 +- 0.02),
# 16 seeds (0.082, 0.073, 0.064, 0.058, 0.059 at n = 16, 32, ... 256; alike at a quarter of the
# rate).
WIDER = {"d logits": 0.2}
WIDTHS, DEPTHS = (4, 16, 64), (4, 8, 16)
SIZES = {"head_dim": 16, "heads": 4, "depth": 2}
LR = {"adam": 0.02, "sgd": 0.1}


def network(rule, seed=0, lr=None):
    shape = ModelConfig(head_dim=rule.head_dim, heads=rule.heads, layers=rule.depth, patch_size=16)
    model = VisionTransformer(
        shape,
        attention_scale=rule.forward().attention_scale(rule.head_dim),
        residual_multiplier=rule.forward().residual_multiplier,
    )
    planned = plan(model, ROLES, rule, lr=lr or LR[rule.optimizer], eps=1e-15)
    planned.initialise(model, seed)
    return model, planned


def sample(seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(1, 3, 32, 32, generator=generator)
    return image, torch.randint(10, (1,), generator=generator)


def rms(tensors):
    """Over all entries of all tensors, in float64: the smallest changes are 1e-4 of the values."""
    return math.sqrt(sum(t.double().square().mean().item() for t in tensors) / len(tensors))


def root_mean_square(values):
    return math.sqrt(sum(value * value for value in values) / len(values))


def logits_of_heads(attention, query, key):
    """A of (3), shape (B, H, T, T)."""
    q, k = (z.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for z in (query, key))
    return q @ k.transpose(-1, -2) * attention.attention_scale


@torch.no_grad()
def forward(model, image):
    """The logits and, per block, the attention's input, q, k and the stream after the block."""
    seen, handles = [], []
    for block in model.blocks:
        place = {}
        seen.append(place)
        for name, module in (
            ("query", block.attention.query),
            ("key", block.attention.key),
            ("stream", block),
        ):

            def keep(_, inputs, output, place=place, name=name):
                place.update({name: output.clone(), f"{name}_input": inputs[0].clone()})

            handles.append(module.register_forward_hook(keep))
    logits = model(image)
    for handle in handles:
        handle.remove()
    return logits, seen


@functools.cache
def measured(rule, seed):
    """RMS by quantity, at initialisation and of the changes that one step makes.

    dk and dA are what the new W_Q and W_K do to the initial stream; "total" ones are of everything.
    dW are movements of W_Q and W_K relative to their initial size, as observations record them.
    """
    (initial, _), (model, planned) = (network(rule, seed) for _ in range(2))
    image, label = sample(seed)
    logits, first = forward(model, image)
    optimizer = optimizers.build(rule.optimizer, planned.groups(model), momentum=0.0)
    F.cross_entropy(model(image), label).backward()
    optimizer.step()
    after, second = forward(model, image)
    attentions = [block.attention for block in model.blocks]
    before = [
        logits_of_heads(a, at["query"], at["key"]) for a, at in zip(attentions, first, strict=True)
    ]
    with torch.no_grad():
        new = [
            (a.query(at["query_input"]), a.key(at["key_input"]))
            for a, at in zip(attentions, first, strict=True)
        ]
    moved = [logits_of_heads(a, q, k) for a, (q, k) in zip(attentions, new, strict=True)]
    weights = weight_movement(initial, model)
    return {
        "stream": rms([first[-1]["stream"]]),
        "logits": rms([logits]),
        "key": rms([at["key"] for at in first]),
        "head variance": sum(a.var(1).mean().item() for a in before) / len(before),
        "d stream": rms([second[-1]["stream"] - first[-1]["stream"]]),
        "d logits": rms([after - logits]),
        "total dk": rms([now["key"] - at["key"] for now, at in zip(second, first, strict=True)]),
        "dk": rms([key - at["key"] for (_, key), at in zip(new, first, strict=True)]),
        "dA": rms([now - was for now, was in zip(moved, before, strict=True)]),
        "dW Q": root_mean_square([at["query_weight_relative"] for at in weights]),
        "dW K": root_mean_square([at["key_weight_relative"] for at in weights]),
    }


def slopes(key, values, optimizer, **fields):
    """Quantity -> power of the scanned size; means of logarithms over seeds."""
    points = [
        [
            measured(Bordelon(**{**SIZES, **fields, key: value}, optimizer=optimizer), seed)
            for seed in range(SEEDS)
        ]
        for value in values
    ]
    size = torch.tensor(values).double().log()
    size -= size.mean()

    def slope(name):
        logs = torch.tensor([[p[name] for p in seeds] for seeds in points]).double().log().mean(1)
        return (size @ logs / size.square().sum()).item()

    return {name: slope(name) for name in points[0][0]}


def check(found, **expected):
    """Compares slopes; the names' underscores stand for blanks."""
    for name, exponent in expected.items():
        name = name.replace("_", " ")
        assert found[name] == pytest.approx(exponent, abs=WIDER.get(name, TOLERANCE)), name


# The head dimension, the heads, the depth


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_head_dimension_changes_scales_as_the_paper_says(optimizer, alpha):
    """Table 3 and (15); one step of SGD has a further N^(-1/2) in dk and dA (Fig. 13)."""
    found = slopes("head_dim", WIDTHS, optimizer, alpha_attention=alpha)
    check(found, stream=0, logits=-0.5, key=0, d_stream=0, d_logits=0, total_dk=0)
    check(found, head_variance=1 - 2 * alpha)
    first = -0.5 if optimizer == "sgd" else 0.0
    check(found, dk=alpha - 1 + first, dA=first)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_number_of_heads_changes_nothing_but_initial_logits(optimizer, alpha):
    found = slopes("heads", WIDTHS, optimizer, head_dim=4, alpha_attention=alpha)
    check(found, stream=0, logits=-0.5, key=0, d_stream=0, d_logits=0, total_dk=0)
    check(found, head_variance=0, dk=0, dA=0)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_the_depth_leaves_the_attention_to_alpha_depth(optimizer, alpha):
    """(15), (16): what a block's own weights do to its attention goes as L^(alpha_depth - 1).

    So does their movement relative to where they start, at a std without L. Adam: each entry moves
    by the rate, n^(-1/2) L^(alpha_depth - 1). SGD: the rate has L^(2 alpha_depth - 1). The gradient
    of the last stream has no L: the output is first_multiplier / n times the readout's weights,
    whose std is 1 / first_multiplier. It enters each block through the branch's multiplier,
    L^(-alpha_depth), and the product of both is L^(alpha_depth - 1).
    """
    found = slopes("depth", DEPTHS, optimizer, alpha_depth=alpha)
    check(found, stream=0, logits=0, key=0, d_stream=0, d_logits=0, head_variance=0)
    check(found, dk=alpha - 1, dA=alpha - 1)
    check(found, dW_Q=alpha - 1, dW_K=alpha - 1)
    if optimizer == "adam":  # the rate and nothing else
        assert found["dW Q"] == pytest.approx(alpha - 1, abs=0.01)


@pytest.mark.parametrize(("optimizer", "stream", "logits"), [("sgd", 1, 0), ("adam", 0, -1)])
def test_gamma0_is_how_much_features_move_for_a_change_of_the_output(optimizer, stream, logits):
    """SGD's rate has gamma0^2, Adam's none."""
    found = slopes("gamma0", (0.5, 1.0, 2.0), optimizer)
    check(found, stream=0, logits=-1, d_stream=stream, d_logits=logits)


# All layers after several steps: the attention logits move further than W_Q and W_K alone move them

HEAD_DIMS, DRAWS, STEPS = (32, 256), 5, 20
fitted_once = pytest.mark.xdist_group("powers of n")  # two tests have the same


def fitted_to_images(rule, seed, cut):
    """A network at initialisation, after 20 steps of SGD on 32 images, and the images.

    With `cut` no gradient reaches the residual stream through queries and keys, which all learn.
    """
    (initial, _), (model, planned) = (network(rule, seed, lr=0.5) for _ in range(2))
    for layer in (model.blocks[0].attention.query, model.blocks[0].attention.key) if cut else ():
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
    generator = torch.Generator().manual_seed(1000 + seed)
    images = torch.randn(32, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)
    optimizer = optimizers.build("sgd", planned.groups(model), momentum=0.0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return initial, model, images


@functools.cache
def powers_of_n(alpha, cut=False):
    """The powers of N of the RMS change of A, total and weight-induced, and their errors."""
    size = torch.tensor(HEAD_DIMS).double().log()
    size -= size.mean()
    changes = torch.empty(DRAWS, len(HEAD_DIMS), 2, dtype=torch.float64)
    for draw in range(DRAWS):
        for place, head_dim in enumerate(HEAD_DIMS):
            sizes = {"head_dim": head_dim, "heads": 1, "depth": 1, "optimizer": "sgd"}
            rule = Bordelon(**sizes, beta0=4.0, gamma0=2.0, alpha_attention=alpha)
            states = fitted_to_images(rule, draw, cut)
            found = observations.observe(*states, lambda model, images: model(images)).all
            names = ("attention_change", "attention_change_weights")
            changes[draw, place] = torch.tensor([found[name] for name in names])
    found = torch.einsum("n,dnc->dc", size, changes.log()) / size.square().sum()
    return found.mean(0).tolist(), (found.std(0) / math.sqrt(DRAWS)).tolist()


@fitted_once
@pytest.mark.parametrize(("alpha", "exponent"), [(0.5, 0.5), (1.0, -0.5)])
def test_the_total_change_of_logits_grows_with_n_at_alpha_one_half_only(alpha, exponent):
    """(15) and Table 3, dA of order one at every alpha_A, count what W_Q and W_K change.

    Where the embedding learns, too, the gradient of the stream has a part along W_Q(0)^T k. It has
    passed A = N^(-alpha_A) q.k and a sum over N products with values, of random signs at first,
    and so is N^(1/2 - alpha_A) of the whole. W_Q(0) makes of it a change of q along k, whose N
    products with k add up in A: dA ~ N^p, p = 1 - alpha_A + 1/2 - alpha_A. Later the signs are
    learnt, the part is of order one, and p = 1 - alpha_A: still growth at 1/2 and none at 1.

    Seen here: the first steps of SGD on a fixed batch; a slope of five draws of one head scatters
    by 0.1.
    """
    (total, induced), (error, _) = powers_of_n(alpha)
    assert total == pytest.approx(exponent, abs=0.3)
    assert abs(total) > 4 * error
    assert induced < -0.1


@fitted_once
def test_logits_grow_by_the_gradient_that_comes_through_them():
    """Without it the stream moves at random to q and k: dA ~ N^(1/2 - alpha_A), N^0 here.

    Measured: -0.04 +- 0.03, and 0.44 +- 0.07 with it on the same draws.
    """
    (total, _), _ = powers_of_n(0.5)
    (cut, _), (error, _) = powers_of_n(0.5, cut=True)
    assert cut < total - 0.25
    assert abs(cut) < max(4 * error, 0.2)


# The command's check of any size


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def builder(key, name, **fields):
    """Build of a network of one size and the check's own sample."""

    def build(value, seed):
        model, planned = network(Bordelon(**{**SIZES, **fields, key: value}, optimizer=name))
        optimizer = optimizers.build(name, planned.groups(model), momentum=0.0)
        return Check(model, planned, [sample(seed)], loss, optimizer)

    return build


def test_points_of_blocks_are_those_at_the_same_relative_depths():
    """Two blocks end at 1/2 and 1 of every depth; inside of them a query reads the stream before,
    and a branch the stream in the middle: 1/4 of a block on the average."""
    alike = {2: [(0, 0), (1, 1)], 4: [(0, 1), (2, 3)], 8: [(1, 3), (5, 7)]}  # (inside, end)
    points = measure(builder("depth", "adam"), tuple(alike), steps=1, seeds=(0,)).points
    found = {(p.name, p.width): p.rms for p in points if p.quantity == "init"}
    for depth, blocks in alike.items():
        model, _ = network(Bordelon(**{**SIZES, "depth": depth}))
        _, seen = forward(model, sample(0)[0])
        for block, (inside, end) in enumerate(blocks):
            key = found[f"blocks.{block}.attention.key", depth]
            assert key == pytest.approx(rms([seen[inside]["key"]]), rel=1e-5)
            stream = found[f"blocks.{block}", depth]
            assert stream == pytest.approx(rms([seen[end]["stream"]]), rel=1e-5)
        assert (f"blocks.{len(blocks)}", depth) not in found
