"""What an unlogged step asks of a GPU, counted with *meta* in its place: no GPU is needed."""

import pytest
import torch

from tests.training.counting import Counted, bytes_per_entry, triton_kernels
from tests.training.tiny_task import task
from training import linear_cross_entropy as losses
from training import loop as loops
from training import processes
from training.loop import Loop

TOKENS, WIDTH, VOCABULARY = 23, 6, 37


@pytest.mark.parametrize(("low", "size"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_on_a_gpu_one_kernel_reads_the_logits_twice_and_writes_them_once(low, size, monkeypatch):
    """6 bytes per logit in bfloat16; the eager passes that were here moved 28."""
    logits, ids = torch.zeros(64, 32_160, dtype=low), torch.zeros(64, 1, dtype=torch.int64)
    rest = (logits[:, :1].clone(), torch.zeros(64))
    kernels, code = triton_kernels(losses._two_passes.function, logits, ids, *rest, monkeypatch=monkeypatch)
    assert len(kernels) == 1 and bytes_per_entry(code) == 3 * size


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


@pytest.fixture
def on_meta(monkeypatch):
    """Runs whose accelerator is *meta*."""
    real = processes.accelerator

    def accelerator(*args):
        made = real(*args)
        made.state.device = torch.device("meta")
        return made

    monkeypatch.setattr(processes, "accelerator", accelerator)
    monkeypatch.setattr(loops, "initialise", lambda task: None)  # there are no values
    monkeypatch.setattr(Loop, "_log_step", lambda *args: None)  # reads, as it may


@pytest.mark.parametrize("name", ["adam", "sgd", "adam_param_scaling", "adafactor", "adam_atan2"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer__clip_norm": 1.0},
        {"training__skip_overflow": True},
        {"training__precision": "fp16"},
        {"training__micro_batch_size": 3},
    ],
)
def test_an_unlogged_step_reads_nothing_and_waits_for_no_copy(on_meta, tmp_path, name, changes):
    loop = Loop(task(optimizer__name=name, training__log_every=5, **changes), tmp_path)
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
