"""The experiments whose costs are compared with what is built: sizes, inputs and conventions."""

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from training.config import set_keys, validate
from training.experiment import load_experiment
from training.optim import optimizers
from vit_cifar5m.model import cross_entropy


@dataclass(frozen=True)
class Costed:
    """An experiment, its sizes, and where its counts differ from torch's by convention."""

    name: str
    base: dict
    keys: list[str]
    """What a shape has a number for."""
    shapes: tuple[tuple, ...]
    paper: tuple
    stem: Callable[[str], bool]
    """Whether a tensor of this name is no part of the blocks and the readout."""
    inputs: Callable
    loss: Callable
    uncounted: Callable
    """FLOPs of one step by convention, minus those of a forward and backward pass by torch."""

    @property
    def cost(self):
        return importlib.import_module(f"{self.name}.cost")

    def settings(self, shape, **changes):
        """A config; `__` stands for the dot of a key."""
        values = dict(zip(self.keys, shape, strict=True))
        values |= {key.replace("__", "."): value for key, value in changes.items()}
        base = {"optimizer": {"name": "adam", "lr": 1.0}, "schedule": {}, **self.base}
        return validate(load_experiment(self.name).config, set_keys(base, values), "test")

    def network(self, config, device="cpu"):
        """The config's model, initialised unless it is on meta, and its optimiser."""
        train = importlib.import_module(f"{self.name}.train")
        words = (self.cost.vocabulary(config),) if hasattr(self.cost, "vocabulary") else ()
        with torch.device(device):
            model = train.build_model(config, *words)
        if device == "meta":
            return model, None
        planned = train.build_plan(config, model)
        planned.initialise(model, 0)
        return model, optimizers.build(config.optimizer.name, planned.groups(model))


def autocast(config):
    low = config.training.precision != "fp32"
    return torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()


def seeded():
    return torch.Generator().manual_seed(0)


# BART


def bart_inputs(config):
    """Encoder ids, decoder ids and targets of full samples."""
    size = (3, config.training.batch_size, BART.cost.tokens(config))
    ids = torch.randint(4, BART.cost.vocabulary(config), size, generator=seeded())
    return [part.clone() for part in ids]


def bart_loss(config, model, *batch):
    with autocast(config):
        return model(*batch)


def bart_uncounted(config, model):
    """The decoder's own attention is causal, half of the pairs of positions that torch counts. The
    output and its loss are one function, of which torch counts the forward pass twice."""
    shape, rows = config.model, config.training.batch_size
    return -6 * shape.layers * rows * BART.cost.tokens(config) ** 2 * shape.width


BART = Costed(
    name="bart_span_denoise",
    # With dropout of attention a CPU computes it as no GPU does.
    base={
        "prescription": {"strategy": "neural_tangent"},
        "training": {"steps": 7},
        "model": {"attention_dropout": 0.0},
        "data": {},
    },
    keys=(
        "model.width model.layers model.head_dim model.mlp_ratio model.vocab_size "
        "data.tokens_per_sample training.batch_size"
    ).split(),
    shapes=((64, 1, 16, 4, 100, 30, 4), (48, 3, 8, 2, 211, 38, 2), (32, 2, 32, 1, 64, 14, 5)),
    paper=(1024, 12, 64, 4, 50_265, 512, 512),
    stem=lambda name: "_blocks." not in name,
    inputs=bart_inputs,
    loss=bart_loss,
    uncounted=bart_uncounted,
)
R2C2 = (2048, 22, 64, 4, 50_265, 512, 512)


# NanoDO, and Bordelon et al.'s decoder


def nano_inputs(config):
    shape = (config.training.batch_size, config.model.context)
    return (torch.randint(NANO.cost.vocabulary(config), shape, generator=seeded()),)


def nano_loss(config, model, ids):
    with autocast(config):
        return model(ids, ids)


def nano_uncounted(config, model):
    """Our attention is causal: half of the pairs of positions that torch counts."""
    shape, rows = config.model, config.training.batch_size
    return -6 * shape.layers * rows * shape.context**2 * shape.width


NANO = Costed(
    name="nanolm_c4",
    base={
        "prescription": {"parameterization": "standard", "alignment": "global", "base_width": 64},
        "training": {"steps": 7},
        "model": {},
        "data": {},
    },
    keys=(
        "model.width model.layers model.head_dim model.mlp_ratio model.context "
        "model.vocab_size training.batch_size"
    ).split(),
    # The second is large enough for Adafactor's factored state.
    shapes=((48, 3, 8, 2, 40, 211, 2), (128, 1, 64, 2, 130, 200, 2), (32, 2, 32, 1, 16, 64, 5)),
    paper=(1024, 8, 128, 4, 512, 32_101, 256),
    stem=lambda name: name == "token_embedding.weight",
    inputs=nano_inputs,
    loss=nano_loss,
    uncounted=nano_uncounted,
)
BORDELON = {
    "parameterization": "bordelon",
    "alpha_attention": 1.0,
    "alpha_depth": 1.0,
    "beta0": 4.0,
    "gamma0": 0.25,
}
DECODER = replace(
    NANO, base={**NANO.base, "prescription": BORDELON}, paper=(64, 4, 8, 1, 128, 32_101, 128)
)


# ViTs


def vit_inputs(config):
    """Images and soft targets."""
    shape, rows = config.model, config.training.batch_size
    images = torch.randn(rows, 3, shape.image_size, shape.image_size, generator=seeded())
    return images, torch.rand(rows, shape.classes, generator=seeded()).softmax(-1)


def vit_loss(config, model, images, targets):
    """The summed loss, as a run has it: float32 after autocast."""
    with autocast(config):
        logits = model(images)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def cifar_inputs(config):
    rows = config.training.batch_size
    images = torch.randn(rows, 3, 32, 32, generator=seeded())
    return images, torch.randint(config.model.classes, (rows,), generator=seeded())


def cifar_loss(config, model, images, labels):
    with autocast(config):
        logits = model(images)
    return cross_entropy(logits, labels)


def patches_uncounted(case, config, model):
    """The gradient of the images, which nobody forms and the convention counts."""
    stem = next(p for name, p in model.named_parameters() if name.startswith("patch_embed"))
    tokens = case.cost.tokens(config.model)
    return 2 * stem.numel() * config.training.batch_size * tokens


VIT = Costed(
    name="vit_imagenet",
    base={
        "prescription": {"strategy": "neural_tangent"},
        "training": {"steps": 7},
        "model": {},
        "data": {"source": "embedded", "augmentation": {"mixup": 0, "cutmix": 0}},
    },
    keys=(
        "model.width model.layers model.head_dim model.mlp_ratio model.patch_size "
        "model.image_size model.classes training.batch_size"
    ).split(),
    shapes=(
        (64, 1, 16, 4, 4, 16, 10, 4),
        (48, 3, 8, 2, 5, 20, 21, 2),
        (32, 2, 32, 1, 4, 32, 300, 5),
    ),
    paper=(768, 12, 64, 4, 16, 224, 1000, 4096),
    stem=lambda name: name in ("patch_embed.proj.weight", "pos_embed"),
    inputs=vit_inputs,
    loss=vit_loss,
    uncounted=lambda config, model: patches_uncounted(VIT, config, model),
)
CIFAR = Costed(
    name="vit_cifar5m",
    base={
        "prescription": {"alpha_attention": 1.0, "alpha_depth": 1.0, "beta0": 4.0, "gamma0": 0.1},
        "training": {"steps": 7},
        "model": {},
        "data": {"source": "embedded"},
    },
    keys="model.head_dim model.heads model.layers model.patch_size training.batch_size".split(),
    shapes=((8, 2, 1, 4, 4), (4, 6, 3, 8, 4), (16, 4, 2, 16, 4)),
    paper=(16, 16, 4, 4, 256),
    stem=lambda name: name in ("patch_embedding.weight", "position_embedding.weight"),
    inputs=cifar_inputs,
    loss=cifar_loss,
    uncounted=lambda config, model: patches_uncounted(CIFAR, config, model),
)
ALL = (BART, NANO, VIT, CIFAR)
