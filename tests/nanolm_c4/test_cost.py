"""Closed forms of a run's cost: against the paper, the model class, torch's optimisers, memory."""

import contextlib
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from measure import observations
from nanolm_c4 import cost, train
from nanolm_c4.config import Config
from nanolm_c4.model import BIAS_COLUMNS
from tests.memory import most_alive, most_allocated, saved_tensors
from training import adafactor, memory, optimizers
from training import linear_cross_entropy as losses
from training.config import load
from training.task import LiveRun, Task, build_optimizer, initialise

ROOT = Path(__file__).resolve().parents[2]
# Everett et al., Table 3: heads -> (embedding, non-embedding, total) parameters.
TABLE_3 = {
    1: (4_108_928, 5_749_504, 9_858_432),
    2: (8_217_856, 14_644_736, 22_862_592),
    4: (16_435_712, 41_872_384, 58_308_096),
    6: (24_653_568, 81_682_944, 106_336_512),
    8: (32_871_424, 134_076_416, 166_947_840),
    12: (49_307_136, 276_612_096, 325_919_232),
    16: (65_742_848, 469_479_424, 535_222_272),
    20: (82_178_560, 712_678_400, 794_856_960),
    24: (98_614_272, 1_006_209_024, 1_104_823_296),
    32: (131_485_696, 1_744_265_216, 1_875_750_912),
    48: (197_228_544, 3_824_357_376, 4_021_585_920),
    64: (262_971_392, 6_709_755_904, 6_972_727_296),
    96: (394_457_088, 14_896_472_064, 15_290_929_152),
    128: (525_942_784, 26_304_413_696, 26_830_356_480),
}
BORDELON = "infinite_limits_laptop"  # Bordelon et al.'s decoder, with biases and without scales
GLOBAL = ["prescription.parameterization=standard", "prescription.alignment=global"]
SHAPES = [  # width, layers, head_dim, mlp_ratio, context, vocabulary, rows
    (64, 1, 16, 4, 64, 100, 4),
    (48, 3, 8, 2, 40, 211, 2),
    (32, 2, 32, 1, 16, 64, 5),
]


def paper(*overrides):
    return load(Config, ROOT / "nanolm_c4/configs/paper.yaml", overrides)


def small(shape=SHAPES[0], *overrides, file="laptop"):
    """A laptop config at one of SHAPES."""
    keys = ("width", "layers", "head_dim", "mlp_ratio", "context", "vocab_size")
    model = [f"model.{key}={value}" for key, value in zip(keys, shape)]
    size = ["model.heads=null", f"training.batch_size={shape[-1]}"]
    return load(Config, ROOT / f"nanolm_c4/configs/{file}.yaml", [*model, *size, *overrides])


def build(config, device="cpu"):
    """The config's model, initialised unless it is on the meta device, and its plan."""
    with torch.device(device):
        model = train.build_model(config, cost.vocabulary(config))
    plan = train.build_plan(config, model)
    if device != "meta":
        plan.initialise(model, 0)
    return model, plan


def batch(config):
    shape = (config.training.batch_size, config.model.context)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, cost.vocabulary(config), shape, generator=generator)


@pytest.mark.parametrize(("heads", "counts"), TABLE_3.items())
def test_parameters_are_those_of_the_papers_table(heads, counts):
    expected = dict(zip(("embedding", "non_embedding", "total"), counts))
    assert cost.parameters(paper(f"model.width={128 * heads}")) == expected


@pytest.mark.parametrize("file", ["laptop", BORDELON])
@pytest.mark.parametrize("shape", [*SHAPES, (6144, 8, 128, 4, 512, 32_101, 256)])
def test_parameters_are_those_of_the_model_class(shape, file):
    config = small(shape, file=file)
    model, _ = build(config, "meta")
    total = sum(parameter.numel() for parameter in model.parameters())
    assert cost.parameters(config) == {
        "embedding": model.token_embedding.weight.numel(),
        "non_embedding": total - model.token_embedding.weight.numel(),
        "total": total,
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_torch_counts(shape):
    """torch counts every pair of positions, and our attention is causal: half of them."""
    config = small(shape, "training.steps=7", "schedule.warmup_steps=0")
    model, _ = build(config)
    ids = batch(config)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    expected = counts[torch.ops.aten.mm] + counts[torch.ops.aten.bmm] / 2
    assert cost.flops(config) == 7 * expected


def test_flops_of_the_papers_base_model():
    config = paper()
    assert cost.tokens_per_step(config) == 131_072
    per_token = 6 * (12 * 8 * 1024**2 + 8 * 512 * 1024 + 32_101 * 1024)
    assert cost.flops(config) == 50_000 * 131_072 * per_token
    assert train.flops(config) == cost.flops(config)


def test_without_a_vocabulary_the_tokeniser_that_would_be_trained_counts():
    shape = (*SHAPES[0][:5], "null", 4)
    with_default = small(shape, "data.tokenizer_vocab_size=300")
    assert cost.vocabulary(with_default) == 300
    assert cost.parameters(with_default)["embedding"] == 300 * 64


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
@pytest.mark.parametrize("shape", [SHAPES[1], (128, 1, 64, 2, 130, 200, 2)])  # not factored, and
def test_optimizer_state_is_what_the_optimizer_keeps(name, shape):
    config = small(shape, f"optimizer.name={name}", *GLOBAL)
    model, plan = build(config)
    optimizer = build_optimizer(
        Task(config, model, plan, train_data=[], eval_data=[], loss=None, count=None)
    )
    model(ids := batch(config), ids).backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert cost.optimizer_state(config) == sum(t.numel() * t.element_size() for t in kept)


def saved_bytes(config):
    """Bytes that autograd keeps for the backward pass, parameters excluded."""
    model, _ = build(config)
    low = config.training.precision == "bf16"
    autocast = torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()
    with saved_tensors(model) as kept, autocast:
        model(ids := batch(config), ids)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("rule", ["standard", "mup", "ntk", "mean_field", "bordelon"])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_what_autograd_keeps(shape, rule, precision):
    """Beside them it keeps the copies of weights and the readout's gradient."""
    words = [f"prescription.parameterization={rule}", f"training.precision={precision}"]
    config = small(shape, *words, file=BORDELON if rule == "bordelon" else "laptop")
    parts = cost.memory(config)
    width = shape[0] + (BIAS_COLUMNS if rule == "bordelon" else 0)
    expected = parts["activations"] + parts["weight_copies"] + 4 * shape[5] * width
    assert expected == pytest.approx(saved_bytes(config), rel=0.02)


def peak_bytes(config, recomputed=False):
    """The largest sum of live tensors in a second step of a micro-batched training loop."""
    model, plan = build(config)
    for block in model.blocks if recomputed else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = build_optimizer(
        Task(config, model, plan, train_data=[], eval_data=[], loss=None, count=None)
    )
    ids = batch(config)
    rows = config.training.micro_batch_size or len(ids)

    def step():
        for part in ids.split(rows):
            model(part, part).backward()
        optimizer.step()
        optimizer.zero_grad()

    return most_alive(model, optimizer, step)


@pytest.mark.parametrize(
    ("file", "shape", "words"),
    [
        ("laptop", (256, 1, 64, 4, 32, 64, 2), ()),  # the optimiser's step is the peak
        ("laptop", (64, 4, 16, 4, 32, 100, 32), ()),  # activations are
        ("laptop", (64, 4, 16, 4, 64, 100, 16), ("training.micro_batch_size=4",)),
        ("laptop", (128, 2, 32, 4, 32, 4000, 8), ()),  # the readout is
        ("laptop", (256, 2, 64, 4, 32, 64, 2), ("prescription.parameterization=ntk",)),
        ("laptop", (256, 2, 64, 4, 32, 64, 2), ("optimizer.name=sgd",)),
        (BORDELON, (256, 3, 8, 1, 8, 64, 2), ()),
        (BORDELON, (64, 3, 8, 1, 8, 64, 64), ()),
        (BORDELON, (64, 3, 8, 1, 8, 4000, 64), ()),
    ],
)
def test_the_total_is_the_peak_of_a_step(file, shape, words):
    config = small(shape, *words, file=file)
    assert cost.memory(config)["total"] == pytest.approx(peak_bytes(config), rel=0.1)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (BORDELON, (128, 2, 4, 1, 128, 64, 4)),  # attention logits are the peak
        (BORDELON, (128, 1, 32, 1, 64, 4000, 16)),  # the output is
        ("laptop", (256, 2, 32, 4, 32, 64, 16)),  # the MLP is
    ],
)
def test_an_observation_takes_what_its_closed_form_says(tmp_path, name, shape):
    observed = ["training.observe_every=10", f"training.observe_samples={shape[-1]}"]
    config = small(shape, *observed, file=name)
    words, rows, context = shape[5], shape[6], shape[4]
    model, plan = build(config, "meta")
    ids = torch.randint(words, (rows, context), generator=torch.Generator().manual_seed(0))
    task = Task(
        config, model.to_empty(device="cpu"), plan, [], [(row, row) for row in ids], None, None,
        forward=lambda model, batch: model(batch[0]),
    )
    initialise(task)
    observer = observations.ObservationRecorder()
    observer.start(
        LiveRun(task, tmp_path, None, torch.device("cpu"), True, False, contextlib.nullcontext)
    )
    expected = cost.memory(config)["observation"]
    found = most_allocated(observer.observe)
    assert expected == pytest.approx(found, rel=0.05)  # 2 MB are float64 pieces of an RMS
    assert cost.memory(config, shards=2)["observation"] == 0  # refused there


def test_shards_divide_the_state_and_replicas_repeat_it():
    config = paper("model.width=4096", "training.micro_batch_size=4")
    one, replicated = cost.memory(config), cost.memory(config, replicas=8)
    sharded = cost.memory(config, shards=8)
    for part in ("weights", "gradients", "optimizer"):
        assert replicated[part] == one[part] == pytest.approx(8 * sharded[part], abs=8)
    assert replicated["activations"] == one["activations"]  # the same micro-batch
    assert replicated["loss"] == one["loss"] == sharded["loss"]
    assert replicated["communication"] == one["weights"]  # DDP's buckets
    assert one["communication"] == 0 < sharded["communication"]


def test_a_gpu_takes_no_more_rows_than_its_share_of_the_batch():
    config = paper("training.batch_size=64", "training.micro_batch_size=32")
    per_row = cost.activations(config, 8) - cost.activations(config, 7)
    first, second = (cost.memory(config, replicas=n)["activations"] for n in (2, 16))
    assert first - second == 28 * per_row


def test_blocks_that_are_recomputed_keep_their_input_and_one_of_them_everything():
    config = small((64, 8, 16, 4, 32, 100, 32))
    parts = cost.memory(config)
    kept = cost.activations(config, 32, recomputed=True)
    assert kept < parts["activations"] / 3
    expected = parts["weights"] + parts["optimizer"] + kept + parts["loss"]
    assert expected == pytest.approx(peak_bytes(config, recomputed=True), rel=0.1)
    assert cost.memory(config, shards=2)["activations"] == cost.activations(config, 16, True)


def test_sharded_runs_have_the_copies_of_one_block():
    for rule, precision, size in (("standard", "fp32", 0), ("ntk", "fp32", 4), ("mup", "bf16", 2)):
        config = paper(f"prescription.parameterization={rule}", f"training.precision={precision}")
        copies = cost.memory(config, shards=8)["weight_copies"]
        assert copies == cost.memory(config)["weight_copies"] / 8 == size * 12 * 1024**2


def test_what_the_closed_forms_assume_of_other_modules_holds():
    assert cost._FACTORED_FROM == adafactor.ADAFACTOR_MIN_DIM
    assert cost._BIAS_COLUMNS == BIAS_COLUMNS
    assert (memory.LOGITS_PER_CHUNK, memory.LINE) == (losses._CHUNK_ELSEWHERE, losses._LINE)
    for rule in ("standard", "mup", "ntk", "mean_field"):
        _, plan = build(small(SHAPES[0], f"prescription.parameterization={rule}"), "meta")
        hidden = plan["blocks.0.mlp.up.weight"].multiplier
        assert (hidden != 1) == (rule in cost._MULTIPLIED)


def test_counting_imports_no_torch():
    code = "import sys, nanolm_c4.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
