"""What an unlogged step asks of a GPU, counted with *meta* in its place: no GPU is needed."""

import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from nanolm_c4.model import RULES as ROLES
from nanolm_c4.model import Decoder
from param_groups import Everett, Muon, plan
from tests.run_folders import dies_after, lines
from tests.training import test_optimizers as written
from tests.training.counting import Counted, bytes_per_entry, triton_kernels
from tests.training.test_divergence import overflowing
from tests.training.tiny_task import task
from training import linear_cross_entropy as losses
from training import loop as loops
from training import processes, sharding
from training.compiled import Compiled
from training.loop import Loop, train
from training.optim import adafactor, optimizers
from training.optim.adafactor import _factored, _unfactored
from training.optim.optimizers import _atan2, _param_scaling

TOKENS, WIDTH, VOCABULARY = 23, 6, 37


@pytest.mark.parametrize(("low", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_on_a_gpu_one_kernel_reads_the_logits_twice_and_writes_them_once(low, size, monkeypatch):
    """6 bytes per logit in bfloat16; the eager passes that were here moved 28."""
    logits, ids = torch.zeros(64, 32_160, dtype=low), torch.zeros(64, 1, dtype=torch.int64)
    rest = (logits[:, :1].clone(), torch.zeros(64))
    kernels, code = triton_kernels(
        losses._two_passes.function, logits, ids, *rest, monkeypatch=monkeypatch
    )
    assert len(kernels) == 1 and bytes_per_entry(code, logits.numel()) == 3 * size


def test_beside_that_kernel_only_the_products_touch_all_logits(monkeypatch):
    """As on a GPU, in chunks; the weight's gradient is added up in float32 by the product."""
    monkeypatch.setattr(losses, "_ANY_SIZE", ())
    monkeypatch.setattr(losses, "_EAGER", ())
    monkeypatch.setattr(losses, "_EXACT_PRODUCTS", ("meta",))
    monkeypatch.setitem(losses._CHUNK, "meta", 5 * VOCABULARY)
    passes = []
    monkeypatch.setattr(losses, "_two_passes", lambda *tensors: passes.append(len(tensors[0])))
    with torch.device("meta"):
        x, weight = torch.empty(TOKENS, WIDTH), torch.empty(VOCABULARY, WIDTH)
        targets = torch.empty(TOKENS, dtype=torch.int64)
    with Counted() as counted:
        losses._chunked(x, weight, targets, 1.0, torch.bfloat16, True)
    assert passes == [5, 5, 5, 5, 3] and not counted.waits
    products = [name for name in counted.launches if "mm" in name]
    assert products.count("aten.mm.out") == 2 * len(passes)
    assert products.count("aten.mm.dtype") == 1
    assert products.count("aten.addmm.dtype_out") == len(passes) - 1
    # gather of the targets' logits and the fill of the padded columns, both small; 84 before.
    assert len(counted.launches) <= 6 * len(passes) + 12, counted.launches


def fused_on_meta(monkeypatch):
    """Every rule as on a GPU: torch's fused kernel, or the rule compiled, here as one launch."""
    for name, kind in optimizers.OPTIMIZERS.items():
        monkeypatch.setitem(optimizers.OPTIMIZERS, name, replace(kind, fused_on=("meta",)))
    kernels = sys.modules["torch.optim.optimizer"]
    monkeypatch.setattr(kernels, "_get_fused_kernels_supported_devices", lambda: ["meta"])


@pytest.fixture
def on_meta(monkeypatch):
    """Runs whose accelerator is *meta*."""
    real = processes.accelerator

    def accelerator(*args):
        made = real(*args)
        made.state.device = torch.device("meta")
        made.prepare_model = lambda model, **settings: model
        return made

    monkeypatch.setattr(processes, "accelerator", accelerator)
    # There are no values, and no autocast.
    scaled = lambda task: task.plan.apply_multipliers(task.model)
    monkeypatch.setattr(loops.tasks, "initialise", scaled)
    monkeypatch.setattr(sharding, "autocast", lambda *args: None)
    fused_on_meta(monkeypatch)
    monkeypatch.setattr(Loop, "_log_step", lambda *args: None)  # reads, as it may


CHANGES = [{}, {"optimizer__clip_norm": 1.0}, {"training__skip_overflow": True}]
CHANGES += [{"training__precision": "fp16"}, {"training__micro_batch_size": 3}]


@pytest.mark.parametrize("name", [name for name in optimizers.OPTIMIZERS if name != "muon"])
@pytest.mark.parametrize("changes", CHANGES)
def test_an_unlogged_step_reads_nothing_and_waits_for_no_copy(on_meta, tmp_path, name, changes):
    run = task(optimizer__name=name, training__log_every=5, **changes)
    run.loss = lambda model, batch: model.readout(model.embedding(batch[0])).square().sum()
    loop = Loop(run, tmp_path)
    waits = []

    def after(step):
        waits.append(list(counted.waits))
        counted.waits.clear()
        if step == 4:
            raise StopIteration

    loop._after = after
    with Counted() as counted, pytest.raises(StopIteration):
        loop._train(0)
    assert waits[2:] == [[], [], []]


def decoder_plan(name, width=64):
    """The optimiser of a decoder of eight blocks on *meta*, with gradients."""
    with torch.device("meta"):
        model = Decoder(
            vocab_size=100, context=8, layers=8, heads=2, head_dim=width // 2, mlp_ratio=4
        )
    several = name == "muon"
    mup = Everett("mup", width, width, optimizer="adam" if several else name)
    rule = Muon(mup) if several else mup
    made = plan(model, ROLES, rule, lr=0.01, eps=1e-8, applied={})
    made.apply_multipliers(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    return optimizers.build(name, made.groups(model, several=several))


NUMBER = torch.tensor(0.5, dtype=torch.float64)
STEP = (NUMBER, NUMBER, torch.tensor(0.0))  # rate, what decay leaves, found_inf
SCALED = (NUMBER, NUMBER, *STEP, NUMBER, 0.9, 0.98)
STACK = (torch.ones(1, 1, 1), *STEP, NUMBER)
RULES = {  # a rule compiled, for a matrix, with the kernels that it is
    "adam_atan2": (lambda w: (_atan2.function, w, w, w, w, NUMBER, *STEP, 0.9, 0.98, 8.0), 1),
    "adam_param_scaling": (lambda w: (_param_scaling.function, w, w, w, w, *SCALED), 3),
    "adafactor": (
        lambda w: (_factored.function, w[None], w[None], w[None, :, 0], w[None, 0], *STACK, 1, 2),
        9,
    ),
    "adafactor, unfactored": (lambda w: (_unfactored.function, *[w[None]] * 3, *STACK), 4),
}
FUSED_ADAMW = 28  # reads weight, gradient and two moments, writes all but the gradient


@pytest.mark.parametrize("name", RULES)
def test_a_compiled_rule_moves_what_fused_adamw_moves(name, monkeypatch):
    """At most 1.5 times its 28 bytes per entry; 68 to 116 in the eager passes that were here."""
    arguments, most = RULES[name]
    function, *tensors = arguments(torch.zeros(1024, 4096))
    tensors = [t.clone() if isinstance(t, torch.Tensor) else t for t in tensors]
    kernels, code = triton_kernels(function, *tensors, monkeypatch=monkeypatch)
    moved = bytes_per_entry(code, tensors[0].numel())
    print(name, moved, len(kernels))
    assert moved + 8 >= FUSED_ADAMW and moved <= 1.5 * FUSED_ADAMW
    assert len(kernels) <= most


# Calls of compiled functions in a step, and launches beside them at most. In eager passes, and
# matrix by matrix, the last four were 248, 834, 422 and 1,395 launches.
LAUNCHES = {
    "sgd": (0, 8),
    "adam": (0, 8),
    "adam_param_scaling": (68, 8),
    "adafactor": (6, 47),  # of stacks, each at most nine launches: 86 in all
    "adam_atan2": (68, 12),
    "muon": (0, 94),  # and on a GPU two casts for each of three stacks
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_of_eight_blocks_is_few_launches_and_waits_for_nothing(name, monkeypatch):
    fused_on_meta(monkeypatch)
    calls = []
    monkeypatch.setattr(Compiled, "__call__", lambda self, *args: calls.append(self))
    optimizer = decoder_plan(name, 512)
    with Counted() as counted:
        optimizer.step()  # makes the state
        counted.launches.clear()
        calls.clear()
        optimizer.step()
    assert not counted.waits
    called, launched = LAUNCHES[name]
    assert len(calls) == called and len(counted.launches) <= launched


@pytest.mark.parametrize("name", [name for name in optimizers.OPTIMIZERS if name != "muon"])
@pytest.mark.parametrize("steps", [{1}, {4, 7}, {4, 5, 6}])
def test_an_overflow_that_the_device_decides_on_is_skipped_and_told_later(
    name, steps, tmp_path, monkeypatch
):
    """On the CPU: the run is that of a host which reads every norm, to rounding."""
    monkeypatch.setattr(Compiled, "__call__", lambda self, *args: self.function(*args))
    changes = {"training__skip_overflow": True, "optimizer__weight_decay": 0.01}
    changes |= {"optimizer__decay_mode": "independent", "optimizer__name": name}
    read, runs = [], []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(loops, "HOSTS", hosts)
        for rule, kind in optimizers.OPTIMIZERS.items():
            monkeypatch.setitem(optimizers.OPTIMIZERS, rule, replace(kind, fused_on=("cpu",)))
        run = overflowing(task(**changes), steps)
        loop = Loop(run, tmp_path / str(len(runs)))
        real = loop._overflows
        loop._overflows = lambda norm, real=real: read.append(norm) or real(norm)
        runs.append((loop.run(), lines(tmp_path / str(len(runs))), run.model.state_dict()))
    assert len(read) == 12 + 5  # the second time at logged steps alone
    (summary, logged, weights), (later, told, others) = runs
    assert summary["skipped_steps"] == len(steps) == later["skipped_steps"]
    assert summary["targets"] == later["targets"]
    for one, other in zip(logged, told, strict=True):
        assert list(other) == list(one)
        for key, value in one.items():
            exact = isinstance(value, (str, int, type(None)))
            assert other[key] == (value if exact else pytest.approx(value, rel=1e-5))
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-5, atol=1e-6)


def test_what_the_device_has_decided_survives_a_checkpoint(tmp_path, monkeypatch):
    """A run that dies between logged steps still tells of the step that it had skipped."""
    monkeypatch.setattr(loops, "HOSTS", ())
    changes = {"training__skip_overflow": True, "checkpoint": {"every": 1, "minutes": None}}
    whole = overflowing(task(**changes), {4})
    Loop(whole, tmp_path / "whole").run()
    run = overflowing(task(**changes), {4})
    dies_after(4, Loop(run, tmp_path / "run").run)
    again = task(**changes)
    summary = Loop(again, tmp_path / "run").run()
    assert summary["skipped_steps"] == 1
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


@pytest.mark.parametrize("name", [name for name in optimizers.OPTIMIZERS if name != "muon"])
def test_what_cuda_graphs_read_stays_where_it_is(name, tmp_path, monkeypatch):
    """They replay addresses: parameters do not move, shapes stay, no gradient is left over."""
    seen, modes = [], []

    def compiled(model, mode=None, **settings):
        def forward(*batch):
            if model.training:
                parameters = list(model.parameters())
                assert all(parameter.grad is None for parameter in parameters)
                addresses = tuple(parameter.data_ptr() for parameter in parameters)
                seen.append((addresses, tuple(part.shape for part in batch)))
            return type(model).forward(model, *batch)

        modes.append(mode)
        model.forward = forward
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    changes = {"training__compile": True, "training__cuda_graphs": True, "optimizer__name": name}
    assert train(task(**changes), tmp_path)["status"] == "finished"
    assert modes == ["reduce-overhead"] and len(seen) == 12 and len(set(seen)) == 1


def test_adafactors_stacks_are_their_tensors_to_the_bit_in_float32(monkeypatch):
    monkeypatch.setattr(Compiled, "__call__", lambda self, *args: self.function(*args))
    shapes = [*[(130, 140)] * 3, *[(140, 130)] * 2, (2, 130, 140), *[(7,)] * 4, *[(3, 4)] * 2]
    ends = []
    for size in (adafactor.STACKED, 0):
        monkeypatch.setattr(adafactor, "STACKED", size)
        with gpu.compiled_everywhere():
            optimizer = written.make("adafactor", written.two_groups(shapes, torch.float32))
        written.train(optimizer, range(1, 5))
        ends.append(torch.cat([torch.tensor(one).flatten() for one in written.values(optimizer)]))
    assert torch.equal(*ends)


def test_what_a_gpu_compiles_is_float64_to_rounding(monkeypatch):
    """Loss and rule compiled into C++; `benchmarks.gpu` has all rules, and takes a minute."""
    monkeypatch.setattr(
        optimizers, "OPTIMIZERS", {"adam_atan2": optimizers.OPTIMIZERS["adam_atan2"]}
    )
    with gpu.compiled_everywhere():
        found = [*gpu.losses("cpu"), *gpu.rules("cpu")]
    assert len(found) == 9 and all(row["passes"] for row in found), found
    assert {row["check"] for row in gpu.compiling("cpu") if row["passes"]} >= {
        "_two_passes is compiled",
        "_atan2 is compiled",
    }
