"""Weights to and from fairseq's BART, whose stock model computes the same function.

fairseq's tensors that this model lacks have one value each: biases 0, norms' scales 1 and shifts
0. N_rescale, which fairseq does not know either, is the scale of the norm before the output. The
exported state loads strictly into `build(model)`, fairseq's own BARTModel in the pre-LayerNorm
form; what came of fairseq without the missing tensors is read as well.

Positions: fairseq's token t uses row t + padding + 1. A model with positions "fairseq" has the same
table; to that of a "paper" model the rows that no token uses are added, as zeros.
"""

from __future__ import annotations

import math
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from zipfile import BadZipFile

import torch
from torch import Tensor

from bart_span_denoise import fairseq_library
from bart_span_denoise.model import Attention, Bart
from training.errors import UserError

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


@torch.no_grad()
def to_fairseq(model: Bart) -> dict[str, Tensor]:
    """The state dict of fairseq's BARTModel, on the CPU; the three names of the words share memory.

    Trained on by fairseq, its biases and norms would train too, and the row of [pad]. Raises
    UserError for a model with factors that fairseq has no place for.
    """
    _check_factors(model)
    ours = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
    state = {name: torch.tensor([3.0]) for name in _VERSIONS}
    state |= dict.fromkeys(_WORDS, ours["word_embedding.weight"].clone())
    for name, theirs in _POSITIONS.items():
        unused = ours[name].new_zeros(_unused_rows(model), ours[name].shape[1])
        state[theirs] = torch.cat([unused, ours[name]])
    state |= {theirs: ours[name].clone() for name, theirs in _matrices(model)}
    dtype = ours["word_embedding.weight"].dtype
    for name, (size, value) in _constants(model).items():
        state[name] = torch.full((size,), value, dtype=dtype)
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
    known = {*_WORDS, *_VERSIONS, *_POSITIONS.values(), *_constants(model)}
    known |= {theirs for _, theirs in _matrices(model)}
    odd = sorted(set(state) - known)
    if odd:
        raise UserError(f"fairseq's state has {odd[0]!r}, which a model of this shape has not")
    _check_constants(state, model)
    words = [_tensor(state, name, _shape(model, "word_embedding.weight")) for name in _WORDS]
    for name, table in zip(_WORDS[1:], words[1:], strict=True):
        if not torch.equal(table, words[0]):
            raise UserError(
                f"{name!r} is not {_WORDS[0]!r}: expected one word embedding for encoder, decoder "
                "and output (fairseq's --share-all-embeddings)"
            )
    values = {"word_embedding.weight": words[0]}
    values |= {name: _positions(state, name, model) for name in _POSITIONS}
    for name, theirs in _matrices(model):
        values[name] = _tensor(state, theirs, _shape(model, name))
    for name, value in values.items():
        model.get_parameter(name).copy_(value)


def save(model: Bart, path: str | Path) -> None:
    """Writes a .pt that fairseq can start from (--restore-file or --finetune-from-model)."""
    history = {"optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    checkpoint = {
        "args": None,
        "cfg": None,
        "model": to_fairseq(model),
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    torch.save(checkpoint, path)


def load(path: str | Path, model: Bart) -> None:
    """Copies the model of a fairseq checkpoint, or a bare state dict, into a model.

    Only tensors and plain values are read, never code. Raises UserError naming the file.
    """
    try:
        from_fairseq(_read(Path(path)), model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def build(model: Bart, dictionary=None):
    """fairseq's own BARTModel of this shape, with values of fairseq's; needs ve-fairseq.

    `dictionary` is a fairseq Dictionary of as many symbols as the model has rows; by default one
    of made-up symbols.
    """
    fairseq = fairseq_library.load()
    rows = model.word_embedding.num_embeddings
    dictionary = _made_up_dictionary(fairseq, rows) if dictionary is None else dictionary
    if (len(dictionary), dictionary.pad()) != (rows, model.padding):
        raise UserError(
            f"the dictionary has {len(dictionary)} symbols and [pad] at {dictionary.pad()}; "
            f"expected {rows} and {model.padding}, as the model has"
        )
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    return fairseq.models.bart.BARTModel.build_model(arguments(model), task)


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
    fairseq_library.load().models.bart.model.bart_large_architecture(args)
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
        for index in range(len(model.get_submodule(f"{side}_blocks"))):
            ours, theirs = f"{side}_blocks.{index}.", f"{side}.layers.{index}."
            yield from _attention(f"{ours}attention.", f"{theirs}self_attn.")
            if side == "decoder":
                yield from _attention(f"{ours}cross_attention.", f"{theirs}encoder_attn.")
            for mine, other in _MLP.items():
                yield f"{ours}mlp.{mine}.weight", f"{theirs}{other}.weight"


def _attention(ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    for mine, other in _ATTENTION.items():
        yield f"{ours}{mine}.weight", f"{theirs}{other}.weight"


def _constants(model: Bart) -> dict[str, tuple[int, float]]:
    """Size and value of fairseq's tensors that are no parameters here."""
    found = {}
    for name, theirs in _matrices(model):
        layer = model.get_submodule(name.removesuffix(".weight"))
        found[theirs.removesuffix("weight") + "bias"] = (layer.out_features, 0.0)
    for prefix in _norms(model):
        found[f"{prefix}.weight"] = (model.word_embedding.embedding_dim, 1.0)
        found[f"{prefix}.bias"] = (model.word_embedding.embedding_dim, 0.0)
    found[_OUTPUT_SCALE] = (model.word_embedding.embedding_dim, model.logit_multiplier)
    return found


def _norms(model: Bart) -> Iterator[str]:
    """fairseq's names of all norms."""
    for side in ("encoder", "decoder"):
        yield f"{side}.layernorm_embedding"
        for index in range(len(model.get_submodule(f"{side}_blocks"))):
            yield f"{side}.layers.{index}.self_attn_layer_norm"
            if side == "decoder":
                yield f"{side}.layers.{index}.encoder_attn_layer_norm"
            yield f"{side}.layers.{index}.final_layer_norm"
        yield f"{side}.layer_norm"


def _check_constants(state: Mapping[str, Tensor], model: Bart) -> None:
    for name, (size, value) in _constants(model).items():
        missing = name not in state
        if missing and (name != _OUTPUT_SCALE or value == 1):
            continue
        wanted = f"{value:g}, N_rescale," if name == _OUTPUT_SCALE else f"{value:g}"
        if missing:
            raise UserError(f"fairseq's state has no {name!r}; expected {wanted} throughout")
        tensor = _tensor(state, name, (size,))
        if not torch.equal(tensor, torch.full_like(tensor, value)):
            raise UserError(
                f"{name!r} is not {wanted} throughout: this model has neither biases nor norms "
                "with parameters of their own"
            )


def _positions(state: Mapping[str, Tensor], name: str, model: Bart) -> Tensor:
    rows, width = _shape(model, name)
    unused = _unused_rows(model)
    found = state.get(_POSITIONS[name])
    if found is not None and found.ndim == 2 and len(found) != rows + unused:
        offset = model.padding + 1
        raise UserError(
            f"{_POSITIONS[name]!r} has {len(found)} rows; expected {rows + unused} for positions: "
            f"{model.positions} (position_rows {rows}; fairseq's tables begin with {offset} rows "
            "that no token uses, which positions: paper leaves out)"
        )
    return _tensor(state, _POSITIONS[name], (rows + unused, width))[unused:]


def _shape(model: Bart, name: str) -> tuple[int, ...]:
    return tuple(model.get_parameter(name).shape)


def _tensor(state: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in state:
        raise UserError(f"fairseq's state has no {name!r}; expected one of shape {shape}")
    if tuple(state[name].shape) != shape:
        raise UserError(f"{name!r} has shape {tuple(state[name].shape)}; expected {shape}")
    return state[name]


def _read(path: Path) -> dict[str, Tensor]:
    """The state dict in a .pt; a UserError for a file that holds anything but plain data."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(error.strerror or str(error)) from None
    except (pickle.UnpicklingError, EOFError, BadZipFile, RuntimeError):
        raise UserError(
            "not a checkpoint of tensors and plain values, which is all that is read; where it "
            "can be trusted, save the 'model' entry of it alone with torch.save"
        ) from None
    state = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise UserError("expected a state dict, or a checkpoint with one under 'model'")
    return state


def _made_up_dictionary(fairseq: ModuleType, rows: int):
    dictionary = fairseq.data.Dictionary()
    for index in range(rows - len(dictionary)):
        dictionary.add_symbol(f"symbol{index}")
    return dictionary
