"""Weights to and from fairseq's BART, whose stock model computes the same function.

fairseq's tensors that this model lacks have one value each: biases 0, norms' scales 1 and shifts
0. N_rescale, which fairseq does not know either, is the scale of the norm before the output. The
exported state loads strictly into `build(model)`, fairseq's own BARTModel in the pre-LayerNorm
form; what came of fairseq without the missing tensors is read as well.

Positions: fairseq's token t uses row t + padding + 1. A model with positions "fairseq" has the same
table; to that of a "paper" model the rows that no token uses are added, as zeros.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import math
import multiprocessing
import random
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from bart_span_denoise.model import Attention, Bart
from training.errors import UserError, reason
from training.files import write_bytes

# What is used of fairseq anywhere; once these are imported, its own modules find the rest loaded.
_PARTS = (
    "checkpoint_utils",
    "data",
    "data.denoising_dataset",
    "data.encoders.gpt2_bpe",
    "models.bart",
    "tasks.denoising",
)
_ATTENTION = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_MLP = {"up": "fc1", "down": "fc2"}
_POSITIONS = {
    "encoder_positions.weight": "encoder.embed_positions.weight",
    "decoder_positions.weight": "decoder.embed_positions.weight",
}
_WORDS = (
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
    "decoder.output_projection.weight",
)
_VERSIONS = ("encoder.version", "decoder.version")
_OUTPUT_SCALE = "decoder.layer_norm.weight"
_STEM_NORMS = ("layernorm_embedding", "layer_norm")


@functools.cache
def fairseq() -> ModuleType:
    """The package `fairseq` with _PARTS, imported here alone; UserError if it is not installed."""
    try:
        with process_as_it_was():
            package = importlib.import_module("fairseq")
            for name in _PARTS:
                importlib.import_module(f"fairseq.{name}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"fairseq cannot be imported, because {error.name or str(error)!r} is not installed: "
            "pip install -r requirements.txt (the package is ve-fairseq)"
        ) from None
    return package


@contextlib.contextmanager
def process_as_it_was() -> Iterator[None]:
    """Undoes what importing fairseq does: it gives the root logger a handler and a level, fixes the
    start method of processes and draws random numbers."""
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    start_method = multiprocessing.get_start_method(allow_none=True)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.INFO)  # its modules log while they are imported
            yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers
        multiprocessing.set_start_method(start_method, force=True)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@torch.no_grad()
def to_fairseq(model: Bart) -> dict[str, Tensor]:
    """The state dict of fairseq's BARTModel, on the CPU; the three names of the words share memory.

    If fairseq trains it further, biases, norms and the row of [pad] train, too. Raises
    UserError for a model with factors that fairseq has no place for.
    """
    _check_factors(model)
    ours = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
    words = ours["word_embedding.weight"].clone()
    state = {name: torch.tensor([3.0]) for name in _VERSIONS} | dict.fromkeys(_WORDS, words)
    for name, theirs in _POSITIONS.items():
        unused = ours[name].new_zeros(_unused_rows(model), words.shape[1])
        state[theirs] = torch.cat([unused, ours[name]])
    state |= {theirs: ours[name].clone() for name, theirs in _matrices(model)}
    for name, (shape, value) in _constants(model).items():
        state[name] = torch.full(shape, value, dtype=words.dtype)
    return state


@torch.no_grad()
def from_fairseq(state: Mapping[str, Tensor], model: Bart) -> None:
    """Copies a state dict of fairseq's BART into a model of the same shape.

    Biases and norms' parameters may be missing. The row of [pad] comes as it is: fairseq trains it,
    and without it the logits would differ. Raises UserError, and changes nothing, for a tensor that
    is missing, unknown or of another shape, a bias that is not zero, a norm's scale or shift that
    is not the identity, an output that is not tied to the embeddings, and a model with factors
    that fairseq has no place for.
    """
    _check_factors(model)
    constants, shapes = _constants(model), {}
    ours = dict.fromkeys(_WORDS, "word_embedding.weight") | {b: a for a, b in _matrices(model)}
    for theirs, name in (ours | {theirs: name for name, theirs in _POSITIONS.items()}).items():
        rows, columns = model.get_parameter(name).shape
        shapes[theirs] = (rows + _unused_rows(model) * (name in _POSITIONS), columns)
    shapes |= {name: shape for name, (shape, _) in constants.items()}
    if odd := sorted(set(state) - set(shapes) - set(_VERSIONS)):
        raise UserError(f"fairseq's state has {odd[0]!r}, which a model of this shape lacks")
    for name, shape in shapes.items():
        value = constants.get(name, (shape, None))[1]
        if name not in state:
            if name in constants and (name != _OUTPUT_SCALE or value == 1):
                continue
            raise UserError(f"fairseq's state has no {name!r}; expected one of shape {shape}")
        if state[name].shape != shape:
            raise UserError(f"{name!r} has shape {tuple(state[name].shape)}; expected {shape}")
        if value is not None and not torch.equal(state[name], torch.full_like(state[name], value)):
            raise UserError(
                f"{name!r} is not {value:g} throughout: this model has neither biases nor norms "
                "with parameters of their own"
            )
    for name in _WORDS:
        if not torch.equal(state[name], state[_WORDS[0]]):
            raise UserError(
                f"{name!r} is not {_WORDS[0]!r}: expected one word embedding for encoder, decoder "
                "and output (fairseq's --share-all-embeddings)"
            )
    for theirs, name in ours.items():
        model.get_parameter(name).copy_(state[theirs])
    for name, theirs in _POSITIONS.items():
        model.get_parameter(name).copy_(state[theirs][_unused_rows(model) :])


def save(model: Bart, path: str | Path) -> None:
    """Writes a .pt that fairseq can start from (--restore-file or --finetune-from-model).

    Whole or not at all: UserError naming the file, as on a full disk.
    """
    history = {"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    checkpoint = {
        "args": None,
        "cfg": None,
        "model": to_fairseq(model),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    content = io.BytesIO()
    torch.save(checkpoint, content)
    write_bytes(Path(path), content.getvalue())


def load(path: str | Path, model: Bart) -> None:
    """Copies the model of a fairseq checkpoint, or a bare state dict, into a model.

    Only tensors and plain values are read, never code. Raises UserError naming the file.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of torch's reader, zip or pickle: the file is none
        raise UserError(f"{path}: not a fairseq checkpoint: {reason(error)}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a fairseq checkpoint: it holds a {type(content).__name__}")
    try:
        from_fairseq(content.get("model", content), model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def build(model: Bart, dictionary=None):
    """fairseq's own BARTModel of this shape, with values of fairseq's; needs ve-fairseq.

    `dictionary` is a fairseq Dictionary of as many symbols as the model has rows; by default one
    of made-up symbols.
    """
    rows = model.word_embedding.num_embeddings
    if dictionary is None:
        dictionary = fairseq().data.Dictionary()
        for index in range(rows - len(dictionary)):
            dictionary.add_symbol(f"symbol{index}")
    if (len(dictionary), dictionary.pad()) != (rows, model.padding):
        raise UserError(
            f"the dictionary has {len(dictionary)} symbols and [pad] at {dictionary.pad()}; "
            f"expected {rows} and {model.padding}, as the model has"
        )
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return fairseq().models.bart.BARTModel.build_model(arguments(model), task)


def arguments(model: Bart) -> Namespace:
    """The options of fairseq's --arch bart_large that make it a model of this shape."""
    words, block = model.word_embedding, model.encoder_blocks[0]
    args = Namespace(
        arch="bart_large",
        task="denoising",
        encoder_embed_dim=words.embedding_dim,
        encoder_ffn_embed_dim=block.mlp.up.out_features,
        encoder_layers=len(model.encoder_blocks),
        decoder_layers=len(model.decoder_blocks),
        encoder_attention_heads=block.attention.heads,
        decoder_attention_heads=block.attention.heads,
        encoder_normalize_before=True,
        decoder_normalize_before=True,
        layernorm_embedding=True,
        share_all_embeddings=True,
        max_source_positions=model.longest,  # to which fairseq adds padding + 1 rows
        max_target_positions=model.longest,
        dropout=model.dropout.p,
        attention_dropout=block.attention.dropout,
        activation_fn="gelu",
    )
    fairseq().models.bart.model.bart_large_architecture(args)
    return args


def _check_factors(model: Bart) -> None:
    """fairseq's attention logits are scaled by K^(-1/2), and its layers have no multipliers."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            standard = (module.query.out_features // module.heads) ** -0.5
            if not math.isclose(module.attention_scale, standard, rel_tol=1e-12):
                raise UserError(
                    f"{name!r} scales its logits by {module.attention_scale:g}; fairseq's scale is "
                    f"{standard:g}"
                )
        if getattr(module, "multiplier", 1.0) != 1.0:
            raise UserError(
                f"{name!r} has multiplier {module.multiplier:g}, for which fairseq has no place; "
                "plan with absorb_multipliers=True"
            )


def _unused_rows(model: Bart) -> int:
    """The rows of fairseq's position tables that the model's own do not have."""
    return model.padding + 1 - model.first_position


def _matrices(model: Bart) -> Iterator[tuple[str, str]]:
    """Names of the blocks' matrices, here and in fairseq."""
    for side in ("encoder", "decoder"):
        attentions = {"attention": "self_attn", "cross_attention": "encoder_attn"}
        for index in range(len(model.get_submodule(f"{side}_blocks"))):
            ours, theirs = f"{side}_blocks.{index}", f"{side}.layers.{index}"
            for mine, other in list(attentions.items())[: 1 + (side == "decoder")]:
                for name, called in _ATTENTION.items():
                    yield f"{ours}.{mine}.{name}.weight", f"{theirs}.{other}.{called}.weight"
            for name, called in _MLP.items():
                yield f"{ours}.mlp.{name}.weight", f"{theirs}.{called}.weight"


def _constants(model: Bart) -> dict[str, tuple[tuple[int], float]]:
    """Shape and value of fairseq's tensors that are no parameters here: biases and norms."""
    found, norms = {}, []
    for name, theirs in _matrices(model):
        layer = model.get_submodule(name.removesuffix(".weight"))
        found[theirs.removesuffix("weight") + "bias"] = ((layer.out_features,), 0.0)
        if theirs.endswith("attn.q_proj.weight"):
            norms.append(theirs.removesuffix(".q_proj.weight") + "_layer_norm")
        if theirs.endswith("fc1.weight"):
            norms.append(theirs.removesuffix("fc1.weight") + "final_layer_norm")
    norms += [f"{side}.{end}" for side in ("encoder", "decoder") for end in _STEM_NORMS]
    width = (model.word_embedding.embedding_dim,)
    for norm in norms:
        found |= {f"{norm}.weight": (width, 1.0), f"{norm}.bias": (width, 0.0)}
    return found | {_OUTPUT_SCALE: (width, model.logit_multiplier)}
