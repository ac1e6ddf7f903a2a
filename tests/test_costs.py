"""What runs cost, of all experiments: parameters and FLOPs against the papers and torch's counter,
and simulated steps against the memory that real ones take."""

import importlib
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.memory import most_alive
from training import sharding
from training.config import load
from training.experiment import load_experiment
from training.optim import optimizers
from training.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
BART, NANO, DECODER = "bart_span_denoise", "nanolm_c4", "decoder"
VIT, CIFAR = "vit_imagenet", "vit_cifar5m"
ENDS = "model.vocab_size", "training.batch_size"
SIZES = ("model.width", "model.layers", "model.head_dim", "model.mlp_ratio")
DECODERS = (*SIZES, "model.context", *ENDS)
# Keys of the sizes, and a file with other settings that cost nothing here: without dropout of
# attention, which a CPU computes as no GPU does, or images that are mixed.
KEYS = {
    BART: (*SIZES, "data.tokens_per_sample", *ENDS),
    NANO: DECODERS,
    DECODER: DECODERS,
    VIT: (*SIZES, "model.patch_size", "model.image_size", "model.classes", ENDS[1]),
    CIFAR: ("model.head_dim", "model.heads", "model.layers", "model.patch_size", ENDS[1]),
}
FILES = {DECODER: "nanolm_c4/configs/infinite_limits_laptop.yaml"}
EVALUATED = "data.eval_resize=32"
MORE = {
    BART: ["model.attention_dropout=0"],
    DECODER: ["model.heads=null"],
    VIT: ["data.augmentation={mixup: 0, cutmix: 0}", "training.eval_every=0", EVALUATED],
}
SHAPES = {
    BART: [(64, 1, 16, 4, 30, 100, 4), (48, 3, 8, 2, 38, 211, 2), (32, 2, 32, 1, 14, 64, 5)],
    NANO: [(48, 3, 8, 2, 40, 211, 2), (128, 1, 64, 2, 130, 200, 2), (32, 2, 32, 1, 16, 64, 5)],
    VIT: [(64, 1, 16, 4, 4, 16, 10, 4), (48, 3, 8, 2, 5, 20, 21, 2), (32, 2, 32, 1, 4, 32, 300, 5)],
    CIFAR: [(8, 2, 1, 4, 4), (4, 6, 3, 8, 4), (16, 4, 2, 16, 4)],
}


def experiment_of(case):
    return load_experiment(NANO if case == DECODER else case)


def settings(case, shape, *words):
    """A laptop's config at other sizes, of seven steps."""
    sizes = [f"{key}={value}" for key, value in zip(KEYS[case], shape, strict=True)]
    base = ["training.steps=7", "schedule.warmup_steps=0"]
    file = FILES.get(case, f"{case}/configs/laptop.yaml")
    words = [*base, *MORE.get(case, []), *sizes, "optimizer.name=adam", *words]
    return load(experiment_of(case).config, ROOT / file, words)


def built(case, config, rows):
    """The config's model, initialised, its loss, its optimiser and a batch."""
    experiment = experiment_of(case)
    model, loss, batch = experiment.build_blank(config, rows)
    plan = experiment.build_plan(config, model)
    plan.initialise(model, 0)
    optimizer = optimizers.build(config.optimizer.name, plan.groups(model))
    return model, loss, optimizer, [part.fill_(5) for part in batch]


@pytest.fixture(autouse=True)
def dropout_as_on_a_gpu(monkeypatch):
    """A CPU's dropout keeps its mask as numbers and not as bytes."""

    def dropout(x, p=0.5, training=True, inplace=False):
        return torch.native_dropout(x, p, training)[0] if p and training else x

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


LARGE, R2C2 = (50_265 + 2 * 514) * 1024, (50_265 + 2 * 514) * 2048
POSITIONS = "model.positions=fairseq"  # 514 rows, of which tokens take 512


# Per token: weights of matrices, and pairs of tokens times width; then per sample.
TEXT = 514 * (28 * 12 * 1024**2 + 50_265 * 1024 + 5 * 12 * 514 * 1024)
PATCHES = 196 * (768**2 + 12 * 12 * 768**2 + 2 * 12 * 196 * 768) + 768_000
CELLS = 64 * (48 * 256 + 24 * 256**2 + 2 * 4 * 64 * 256) + 2560
PAPER = "model.positions=paper"


@pytest.mark.parametrize(
    ("name", "file", "word", "embedding", "total", "tokens", "products", "flops"),
    [
        (BART, "bart_large", PAPER, LARGE, 404_845_568, 512 * 514, TEXT, 1.375e20),
        (BART, "bart_large", POSITIONS, LARGE, 404_845_568, 512 * 512, None, None),
        (BART, "r2c2", PAPER, R2C2, 2_688_739_328, None, None, None),
        (VIT, "paper", "training.steps=93600", 740_352, 86_444_008, 4096 * 196, PATCHES, 4.019e19),
        (CIFAR, "paper", "seed=0", 112 * 256, 1_604_096, 256 * 64, CELLS, 3.297e15),
    ],
)
def test_the_papers_models_and_runs(name, file, word, embedding, total, tokens, products, flops):
    experiment = load_experiment(name)
    config = load(experiment.config, ROOT / f"{name}/configs/{file}.yaml", [word])
    counts = {"embedding": embedding, "non_embedding": total - embedding, "total": total}
    assert experiment.parameters(config) == counts
    assert tokens in (None, experiment.tokens_per_step(config))
    if products:
        exact = 6 * config.training.steps * config.training.batch_size * products
        assert experiment.flops(config) == exact == pytest.approx(flops, rel=1e-3)


def test_every_sample_of_bart_counts_as_the_longest():
    for words in ([], [POSITIONS]):
        config = settings(BART, SHAPES[BART][0], *words)
        tokens = load_experiment(BART).tokens_per_step(config) // config.training.batch_size
        assert tokens == built(BART, config, 1)[0].longest


TOKENS = "data.noise={unit: token}"


@pytest.mark.parametrize(
    ("words", "symbols"),
    [
        (["data.trained_vocab_size=300"], 300),
        (["data.source=text", "data.path=here", "data.trained_vocab_size=999"], 999),
        (["data.source=binarised", "data.path=.", TOKENS], 9),
        (["data.bpe_encoder=e.json", "data.bpe_vocab=v.bpe", "data.bpe_dictionary=dict.txt"], 9),
        (["model.vocab_size=77", "data.source=binarised", "data.path=x", TOKENS], 77),
    ],
)
def test_without_a_vocabulary_the_dictionary_or_bpe_in_use_counts(
    words, symbols, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dict.txt").write_text("a 5\nb 4\nc 3\nd 1\n")  # and 5 special ones
    shape = (1024, 1, 64, 4, 512, "null", 4)
    parameters = load_experiment(BART).parameters(settings(BART, shape, *words))
    assert parameters["embedding"] == (symbols + 2 * 514) * 1024


@pytest.mark.parametrize(("case", "shape"), [(one, s) for one in SHAPES for s in SHAPES[one]])
def test_flops_are_those_torch_counts(case, shape):
    """But for the pairs of causal attention, half of all that torch counts in every layer, and for
    the gradient of the images, which nobody forms and the convention counts."""
    config = settings(case, shape)
    rows, model = config.training.batch_size, built(case, config, config.training.batch_size)[0]
    batch = experiment_of(case).build_blank(config, rows)[2]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*(part.fill_(5) for part in batch[:-1])).sum().backward()
    cost = importlib.import_module(f"{case}.cost")
    if case in (BART, NANO):
        tokens, width = cost.tokens_per_step(config) // rows, config.model.width
        convention = -6 * config.model.layers * rows * tokens**2 * width
    else:
        stem = next(p for name, p in model.named_parameters() if name.startswith("patch_embed"))
        convention = 2 * stem.numel() * cost.tokens_per_step(config)
    assert experiment_of(case).flops(config) == 7 * (counter.get_total_flops() + convention)


def peak_bytes(case, config):
    """The largest sum of live tensors in a second step of a micro-batched training loop."""
    rows = config.training.micro_batch_size or config.training.batch_size
    model, loss, optimizer, batch = built(case, config, rows)
    sharding.autocast(model, "cpu", config.training.precision, False)

    def step():
        for _ in range(config.training.batch_size // rows):
            loss(model, [part.clone() for part in batch]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return most_alive(model, optimizer, step)


BF16, SGD = "training.precision=bf16", "optimizer.name=sgd"
DEEP = (64, 2, 16, 4, 62, 100, 32)
WORDY = (128, 1, 32, 1, 14, 4000, 2)
IMAGES = (64, 2, 16, 4, 4, 32, 10, 64)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "shape", "words"),
    [
        (BART, (256, 1, 64, 4, 14, 64, 2), []),  # the optimiser's step is the peak
        (BART, DEEP, []),  # activations are
        (BART, DEEP, [BF16]),
        (BART, (64, 2, 16, 1, 62, 2000, 16), []),  # logits are
        (BART, WORDY, []),  # the word embedding's gradients are
        (BART, WORDY, ["training.micro_batch_size=1"]),
        (VIT, (256, 1, 64, 4, 4, 8, 10, 2), []),
        (VIT, IMAGES, []),
        (VIT, IMAGES, [BF16]),
        (VIT, (32, 1, 16, 1, 8, 8, 2000, 64), []),
        (VIT, (256, 2, 64, 4, 4, 8, 10, 2), [SGD]),
        (NANO, (256, 1, 64, 4, 32, 64, 2), []),
        (NANO, (64, 2, 16, 4, 32, 100, 64), []),
        (NANO, (64, 2, 16, 4, 64, 100, 16), ["training.micro_batch_size=4"]),
        (NANO, (128, 2, 32, 4, 32, 4000, 8), []),
        (NANO, (256, 2, 64, 4, 32, 64, 2), [SGD]),
        (DECODER, (256, 2, 8, 1, 8, 64, 2), []),
        (DECODER, (64, 2, 8, 1, 8, 64, 64), []),
        (DECODER, (64, 2, 8, 1, 8, 4000, 64), []),
    ],
)
def test_a_simulated_step_takes_what_a_real_one_does(case, shape, words):
    config = settings(case, shape, *words)
    memory = simulate(experiment_of(case), config).memory
    # Gradients of tied weights are added into a third tensor, where real ones may be in place.
    tied = 0.15 if shape == WORDY else 0.05
    assert memory == pytest.approx(peak_bytes(case, config), rel=tied)
