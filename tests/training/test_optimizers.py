"""Every rule against a float64 rewrite of its formula, closed forms, and numbers from optax."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch

from param_groups.families import OPTIMIZER_FAMILY
from training.compiled import Compiled
from training.optim import decoupled, optimizers
from training.optim.adafactor import factored_axes
from training.optim.optimizers import DEFAULTS, OPTIMIZERS, build

# None of these is build's default.
BETAS, MOMENTUM, LAMBDA = (0.8, 0.95), 0.7, 3.0
# Both kernels of the rules that have two.
CASES = [
    *((name, fused) for name in ("sgd", "adam", "adam_param_scaling") for fused in (True, False)),
    ("adafactor", None),
    ("adam_atan2", None),
    *((name, "compiled") for name in ("adam_param_scaling", "adafactor", "adam_atan2")),
]
OURS = [case for case in CASES if case[0] != "adam"]
SMALL = [(5,), (7, 3), (3, 4, 5)]
LARGE = [(130, 140), (140, 130), (130, 5), (2, 130, 140)]
NUMBERS = [
    {"name": "slow", "lr": 1e-3, "eps": 1e-2, "weight_decay": 0.5},
    {"name": "fast", "lr": 3e-2, "eps": 1e-8, "weight_decay": 0.02},
]
FACTORS = [0.0, 0.25, 0.5, 0.75, 1.0, 0.9, 0.7, 0.5, 0.2, 0.1]


def ref_sgd(theta, g, state, t, eps):
    state["b"] = MOMENTUM * state.get("b", 0) + g
    return state["b"]


def moments(g, state, t):
    b1, b2 = BETAS
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g**2
    return state["m"] / (1 - b1**t), state["v"] / (1 - b2**t)


def ref_adam(theta, g, state, t, eps):
    m, v = moments(g, state, t)
    return m / (np.sqrt(v) + eps)


def ref_adam_param_scaling(theta, g, state, t, eps):
    return max(np.sqrt(np.mean(theta**2)), 1e-3) * ref_adam(theta, g, state, t, eps)


def ref_adam_atan2(theta, g, state, t, eps):
    m, v = moments(g, state, t)
    return 4 / np.pi * LAMBDA * np.arctan2(m, LAMBDA * np.sqrt(v))


# The factored axes of the shapes in use, written out.
FACTORED = {(130, 140): (0, 1), (140, 130): (1, 0), (2, 130, 140): (1, 2)}
FACTORED_FROM_4 = {(3, 4, 5): (1, 2), (6, 4): (1, 0), **FACTORED, (130, 5): (1, 0)}


def ref_adafactor(theta, g, state, t, eps, factored=FACTORED):
    beta = 1 - t**-0.8
    square = g**2 + eps
    rows, cols = factored.get(g.shape, (None, None))
    if rows is None:
        state["v"] = v = beta * state.get("v", 0) + (1 - beta) * square
    else:
        state["r"] = beta * state.get("r", 0) + (1 - beta) * square.mean(cols, keepdims=True)
        state["c"] = beta * state.get("c", 0) + (1 - beta) * square.mean(rows, keepdims=True)
        v = state["r"] * state["c"] / state["r"].mean(rows, keepdims=True)
    u = g / np.sqrt(v)
    return max(np.sqrt(np.mean(theta**2)), 1e-3) * u / max(1, np.sqrt(np.mean(u**2)))


REFERENCES = {
    "sgd": ref_sgd,
    "adam": ref_adam,
    "adam_param_scaling": ref_adam_param_scaling,
    "adafactor": ref_adafactor,
    "adam_atan2": ref_adam_atan2,
}


def parameter(values, dtype=torch.float64):
    return torch.tensor(np.asarray(values), dtype=dtype).requires_grad_()


def group(params, **numbers):
    """One plan group; the numbers are small and harmless unless given."""
    row = {"name": "only", "lr": 0.1, "eps": 0.0, "weight_decay": 0.0, **numbers}
    names = [f"tensor{i}" for i in range(len(params))]
    return {"params": list(params), "param_names": names, "initial_lr": row["lr"], **row}


def only(**changes):
    """A list of one plan group with one parameter."""
    return [group([parameter([1.0])], **changes)]


def two_groups(shapes, dtype=torch.float64, seed=0):
    """The two groups of NUMBERS, each with one parameter of every shape."""
    rng = np.random.default_rng(seed)
    return [
        group([parameter(rng.standard_normal(shape), dtype) for shape in shapes], **numbers)
        for numbers in NUMBERS
    ]


def make(name, groups, fused=None, **kwargs):
    """The rule with this file's constants."""
    constants = {"betas": BETAS, "momentum": MOMENTUM, "atan2_lambda": LAMBDA, **kwargs}
    return build(name, groups, fused=fused == "compiled" or fused, **constants)


@pytest.fixture(autouse=True)
def as_on_a_gpu(request, monkeypatch):
    """A case called "compiled" runs what a GPU compiles, as it is written, on the CPU."""
    spec = getattr(request.node, "callspec", None)
    if spec is not None and spec.params.get("fused") == "compiled":
        for name, kind in OPTIMIZERS.items():
            monkeypatch.setitem(OPTIMIZERS, name, dataclasses.replace(kind, fused_on=("cpu",)))
        monkeypatch.setattr(optimizers, "TORCHS_KERNEL", ())
        monkeypatch.setattr(Compiled, "__call__", lambda self, *args: self.function(*args))


def gradient(shape, step, dtype=torch.float64):
    """A fixed gradient; its size jumps between steps so that clipping has something to do."""
    size = 10.0 if step == 3 else 0.3
    values = size * np.random.default_rng([step, *shape]).standard_normal(shape)
    return torch.tensor(values, dtype=dtype)


def train(optimizer, steps, size=1.0):
    """Steps with `size` times the fixed gradients at scheduled rates."""
    for step in steps:
        for row in optimizer.param_groups:
            row["lr"] = row["initial_lr"] * FACTORS[step]
            for param in row["params"]:
                param.grad = gradient(tuple(param.shape), step, param.dtype) * size
        optimizer.step()


def values(optimizer):
    return [p.detach().numpy().copy() for row in optimizer.param_groups for p in row["params"]]


@pytest.mark.parametrize(
    ("name", "fused", "shapes", "least"),
    [
        *((*case, SMALL, 128) for case in CASES),
        ("adafactor", None, LARGE, 128),
        ("adafactor", None, [*FACTORED_FROM_4, *SMALL], 4),
    ],
)
def test_follows_its_formula_in_two_groups_under_a_schedule(name, fused, shapes, least):
    optimizer = make(name, two_groups(shapes), fused, min_dim_factored=least)
    more = {"factored": FACTORED_FROM_4} if least == 4 else {}
    theta, states = values(optimizer), [{} for _ in range(2 * len(shapes))]
    numbers = [row for row in NUMBERS for _ in shapes]
    for step, factor in enumerate(FACTORS):
        train(optimizer, [step])
        for i, row in enumerate(numbers):
            g = gradient(theta[i].shape, step).numpy()
            lr = row["lr"] * factor
            u = REFERENCES[name](theta[i], g, states[i], step + 1, row["eps"], **more)
            theta[i] = (1 - lr * row["weight_decay"]) * theta[i] - lr * u
    for got, expected in zip(values(optimizer), theta, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "fused"), [case for case in CASES if case[0].startswith("ada")])
def test_a_tensor_of_zeros_moves_at_the_floor_of_the_parameter_scale(name, fused):
    atan2_size = 4 / math.pi * LAMBDA * math.atan(1 / LAMBDA)
    expected = {"adam": 1, "adam_atan2": atan2_size}.get(name, 1e-3)
    param = parameter([0.0, 0.0])
    param.grad = parameter([0.5, -2.0]).detach()
    make(name, [group([param], lr=1.0)], fused).step()
    np.testing.assert_allclose(param.detach().numpy(), [-expected, expected], rtol=1e-12)


def test_adafactor_keeps_rows_and_columns_only_where_both_axes_are_long():
    shapes = [*LARGE, (127, 500)]
    groups = [group([parameter(np.ones(shape)) for shape in shapes])]
    optimizer = make("adafactor", groups)
    train(optimizer, [1])
    kept = [
        {key: tuple(value.shape) for key, value in optimizer.state[param].items() if key != "step"}
        for param in groups[0]["params"]
    ]
    matrix, stack = {"v_row": (130,), "v_col": (140,)}, {"v_row": (2, 130), "v_col": (2, 140)}
    assert kept == [matrix, matrix, {"v": (130, 5)}, stack, {"v": (127, 500)}]


def test_factored_axes_are_the_two_largest():
    for shape, axes in {**FACTORED, (200, 3, 128): (2, 0), (128, 128): (0, 1)}.items():
        assert factored_axes(shape, 128) == axes
    assert factored_axes((130, 5), 128) is factored_axes((), 128) is None
    assert factored_axes((127, 4096), 128) is factored_axes((4096,), 1) is None
    assert factored_axes((127, 4096), 16) == (0, 1)


def test_the_table_has_the_optimisers_whose_exponents_are_known():
    assert OPTIMIZERS.keys() == OPTIMIZER_FAMILY.keys()
    assert {name for name, _ in CASES} == {*OPTIMIZERS} - {"muon"} == set(REFERENCES)
    accepted = {key for kind in OPTIMIZERS.values() for key in kind.numbers}
    assert accepted == DEFAULTS.keys()


def test_defaults_are_the_papers():
    by_name = {name: build(name, only()).param_groups[0] for name in OPTIMIZERS}
    assert by_name["sgd"]["momentum"] == 0.9
    assert by_name["adam_atan2"]["atan2_lambda"] == 8.0
    adams = ("adam", "adam_param_scaling", "adam_atan2")
    assert {by_name[name]["betas"] for name in adams} == {(0.9, 0.98)}


def atan2_path(gradients, fused, dtype=torch.float32, betas=BETAS, lam=8.0, **numbers):
    """A parameter's values while trained with these gradients."""
    param = parameter(np.zeros(gradients.shape[1]), dtype)
    groups = [group([param], **numbers)]
    optimizer = make("adam_atan2", groups, fused, betas=betas, atan2_lambda=lam)
    path = []
    for g in gradients:
        param.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
        path.append(param.detach().double().numpy().copy())
    return np.array(path)


@pytest.mark.parametrize("decades", [-30, -23, -18, -6, 4, 18, 30])
@pytest.mark.parametrize("fused", [None, "compiled"])
def test_atan2_does_not_see_a_common_factor_of_all_gradients(decades, fused):
    rng = np.random.default_rng(1)
    gradients = rng.choice([-1.0, 1.0], (12, 40)) * rng.uniform(0.5, 1.0, (12, 40))
    expected = atan2_path(gradients, fused)
    found = atan2_path(gradients * 10.0**decades, fused)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(expected).max() > 0.1


# From the smallest that leaves float32 its digits to the largest; those between are where squares
# leave the format (1e-19, 1e19) and where a square that did once met an epsilon (1.8e-22).
SIZES = [1e-36, 1e-30, 1e-23, 1.8e-22, 1.5e-22, 1e-20, 1e-19, 1e-6, 1.0, 1e10, 1e19, 1e30, 1e37]


@pytest.mark.parametrize("steps", [1, 200])
@pytest.mark.parametrize("fused", [None, "compiled"])
def test_entries_of_one_tensor_get_the_same_atan2_updates_at_every_size(steps, fused):
    """Constant gradients: m_hat = sqrt(v_hat), so every update is the formula's 1.267."""
    path = atan2_path(np.tile(SIZES, (steps, 1)), fused, lr=1.0)
    updates = -np.diff(path, axis=0, prepend=np.zeros((1, len(SIZES))))
    np.testing.assert_allclose(updates[-1], 4 / math.pi * 8 * math.atan(1 / 8), rtol=1e-4)
    np.testing.assert_allclose(path[-1], path[-1][SIZES.index(1.0)], rtol=1e-5)


@pytest.mark.parametrize("fused", [None, "compiled"])
def test_atan2_updates_stay_within_their_bound_and_nothing_is_no_update(fused):
    """A gradient after two hundred zeros, of any size, is the quotient's largest value; float32
    has nothing below 1e-45, and so there is no update."""
    silent = np.zeros((200, len(SIZES)))
    bound = 4 / math.pi * 8 * math.pi / 2
    for last in (np.array(SIZES), -np.array(SIZES)):
        path = atan2_path(np.vstack([silent, last]), fused, lr=1.0)
        assert not path[-2].any() and (np.abs(path[-1]) <= bound * (1 + 1e-6)).all()
        assert (np.abs(path[-1]) > 1).all()
    assert not atan2_path(np.array([[1e-46, -1e-46, 0.0]]), fused).any()


@pytest.mark.parametrize(
    ("betas", "lam"), [((0.9, 0.98), 8.0), ((0.95, 0.9), 1.0), (BETAS, LAMBDA)]
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1, 1e3])
@pytest.mark.parametrize("fused", [None, "compiled"])
def test_atan2_in_float32_is_the_formula_to_rounding(betas, lam, weight_decay, fused):
    """With gradients that push the quotient around."""
    rng = np.random.default_rng(5)
    gradients = rng.standard_normal((12, 400)) * 10.0 ** rng.integers(-3, 3, (12, 1))
    lr = min(1e-2, 0.1 / max(weight_decay, 1.0))
    numbers = {"lr": lr, "weight_decay": weight_decay}
    single, double = (
        atan2_path(gradients.astype(np.float32), fused, dtype, betas, lam, **numbers)[-1]
        for dtype in (torch.float32, torch.float64)
    )
    np.testing.assert_allclose(single, double, rtol=2e-6, atol=2e-6 * lr)


def sines(shape, k):
    """sin of multiples of 0.7 + 0.1 k, the numbers that optax was given as well."""
    return np.sin(np.arange(1, math.prod(shape) + 1) * (0.7 + 0.1 * k)).reshape(shape)


# optax 0.2.8, three updates at learning rate 0.01 from sines(shape, 0) with gradients
# sines(shape, 1), ...: chain(scale_by_adam(0.9, 0.98, eps=1e-9), scale_by_param_block_rms(),
# scale(-0.01)) and adafactor(0.01), in 64 bits. Entries 0, 777 % size and -1 of the result.
SCALED = "adam_param_scaling"
OPTAX = [
    (SCALED, (5,), 1.0, [0.623706190855226, 0.8439647580257807, -0.33031117671885873]),
    (SCALED, (5,), 1e-5, [-2.3590721425975192e-5, -1.9534724637263998e-5, 2.6467144157707519e-5]),
    ("adafactor", (5,), 1.0, [0.6235164249575875, 0.8490673538912796, -0.32980840256899036]),
    ("adafactor", (130, 140), 1.0, [0.620852301984332, -0.8914857080548481, -0.7459269805563882]),
    ("adafactor", (140, 130), 1.0, [0.620935632225334, -0.8914985997916898, -0.7459126138336506]),
    ("adafactor", (2, 130, 140), 1, [0.6208520477430783, -0.8914857108368512, 0.9942124585092253]),
    ("adafactor", (130, 5), 1.0, [0.622293880017005, 0.9779523563745924, 0.5046200113734913]),
]


@pytest.mark.parametrize(("name", "shape", "size", "expected"), OPTAX)
def test_agrees_with_optax(name, shape, size, expected):
    param = parameter(size * sines(shape, 0))
    eps = 1e-30 if name == "adafactor" else 1e-9
    optimizer = make(name, [group([param], lr=0.01, eps=eps)], betas=(0.9, 0.98))
    for k in (1, 2, 3):
        param.grad = torch.tensor(sines(shape, k))
        optimizer.step()
    got = param.detach().numpy().reshape(-1)[[0, 777 % param.numel(), -1]]
    # optax computes Adafactor's decay rate in single precision.
    tolerance = 1e-8 if name == "adafactor" else 1e-12
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-15)


@pytest.mark.parametrize("size", [1.0, 1e-20])
@pytest.mark.parametrize(("name", "fused"), CASES)
def test_a_plans_groups_resume_bit_for_bit(name, fused, size):
    """A decoder under its plan: a fresh optimiser with loaded state goes on as the old one."""
    from nanolm_c4.model import RULES, Decoder
    from param_groups import Everett, plan

    def start():
        sizes = {"vocab_size": 150, "context": 8, "layers": 2, "heads": 4, "head_dim": 32}
        model = Decoder(**sizes, mlp_ratio=2, attention_scale=0.25)
        rule = Everett("standard", width=128, base_width=32, gamma_embedding=3.0)
        decay = {"weight_decay": 1e-3, "decay_mode": "independent"}
        made = plan(model, RULES, rule, lr=1e-2, eps=1e-30, **decay)
        made.initialise(model, seed=0)
        return model, make(name, made.groups(model), fused)

    model, straight = start()
    train(straight, range(3), size)
    twin, resumed = start()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert len(resumed.param_groups) > 1
    for optimizer in (straight, resumed):
        train(optimizer, range(3, 6), size)
    assert all(np.array_equal(a, b) for a, b in zip(values(straight), values(resumed), strict=True))
    states = [optimizer.state_dict()["state"] for optimizer in (straight, resumed)]
    for index, state in states[0].items():
        assert all(torch.equal(state[key], states[1][index][key]) for key in state)


def test_the_parameter_scale_of_a_large_tensor_keeps_its_digits():
    values = torch.full((1 << 22,), 0.02)
    values[::3] = 0.03
    exact = values.double().square().mean().sqrt().item()
    for tensor in (values, values.view(1 << 11, -1).t()):
        assert decoupled.rms([tensor], [tensor])[0].item() == pytest.approx(exact, rel=5e-6)
    halves = values.bfloat16()
    exact = halves.double().square().mean().sqrt().item()
    assert decoupled.rms([halves], [halves])[0].item() == pytest.approx(exact, rel=1e-2)
    assert decoupled.rms([torch.zeros(0)], [torch.zeros(0)])[0].item() == 0.0


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_step_counts_are_cpu_floats_per_parameter(name, fused):
    optimizer = make(name, two_groups([(5,)]), fused)
    train(optimizer, range(3))
    if name == "sgd":
        assert all(set(state) == {"momentum_buffer"} for state in optimizer.state.values())
        return
    for state in optimizer.state.values():
        step = state["step"]
        assert step.device.type == "cpu" and step.dtype == torch.float32 and step.item() == 3.0


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_parameters_without_gradient_are_left_alone(name, fused):
    groups = two_groups(SMALL)
    optimizer = make(name, groups, fused)
    before = values(optimizer)
    for row in groups:
        row["params"][0].grad = torch.ones_like(row["params"][0])
    optimizer.step()
    for index, (old, new) in enumerate(zip(before, values(optimizer), strict=True)):
        assert np.array_equal(old, new) == (index % len(SMALL) != 0)
    assert len(optimizer.state) == 2


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_a_late_first_gradient_counts_its_own_steps(name, fused):
    early, late, alone = (parameter([1.0, 2.0]) for _ in range(3))
    together = make(name, [group([early, late], eps=1e-8)], fused)
    single = make(name, [group([alone], eps=1e-8)], fused)
    for step in range(4):
        early.grad = gradient((2,), step)
        late.grad = gradient((2,), step) if step >= 2 else None
        alone.grad = late.grad
        together.step()
        single.step()
    np.testing.assert_allclose(late.detach().numpy(), alone.detach().numpy(), rtol=1e-14)
    assert not np.allclose(early.detach().numpy(), late.detach().numpy())


@pytest.mark.parametrize("name", ["sgd", "adam", "adam_param_scaling"])
def test_fused_equals_foreach_in_float32(name):
    runs = [make(name, two_groups(SMALL, torch.float32), fused) for fused in (True, False)]
    for optimizer in runs:
        train(optimizer, range(10))
    for one, other in zip(*map(values, runs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_adam_is_torchs_adamw_and_fused_where_it_can_be():
    optimizer = make("adam", two_groups(SMALL))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert all(row["fused"] for row in optimizer.param_groups)
    assert not any(row["fused"] for row in make("adam", two_groups(SMALL), False).param_groups)
    elsewhere = torch.empty(3, device="meta", requires_grad=True)
    assert not make("adam", [group([elsewhere])]).param_groups[0]["fused"]


@pytest.mark.parametrize(("name", "fused"), OURS)
def test_memory_layouts_of_parameters_and_gradients_do_not_matter(name, fused):
    plain = parameter(np.arange(12.0).reshape(4, 3))
    transposed = plain.detach().t().contiguous().t().requires_grad_()
    strided_grad = plain.detach().clone().requires_grad_()
    runs = [(plain, False), (transposed, False), (strided_grad, True)]
    for param, transpose in runs:
        optimizer = make(name, [group([param], eps=1e-8, weight_decay=0.1)], fused)
        for step in range(3):
            g = gradient((4, 3), step)
            param.grad = g.t().contiguous().t() if transpose else torch.empty_like(param).copy_(g)
            optimizer.step()
    for param in (transposed, strided_grad):
        np.testing.assert_allclose(param.detach().numpy(), plain.detach().numpy(), rtol=1e-13)


@pytest.mark.parametrize(("name", "fused"), OURS)
def test_gradients_are_only_read_and_closures_run(name, fused):
    param = parameter(np.ones((7, 3)))
    optimizer = make(name, [group([param], eps=1e-8)], fused)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 21.0
    assert torch.equal(param.grad, torch.full((7, 3), 2.0, dtype=torch.float64))


@pytest.mark.parametrize(("name", "fused"), CASES)
def test_the_plan_is_copied(name, fused):
    groups = two_groups(SMALL)
    before = copy.deepcopy([{k: v for k, v in row.items() if k != "params"} for row in groups])
    train(make(name, groups, fused), range(2))
    assert [{k: v for k, v in row.items() if k != "params"} for row in groups] == before
