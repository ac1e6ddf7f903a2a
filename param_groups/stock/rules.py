"""Rules of libraries' models: `rules_for(model)` traces Hugging Face's and has lists of others.

Options of a library drop tensors, so lists name all that there may be: pass one through `present`,
or let `rules_for` do it. Class, register and latent tokens are position embeddings: vectors of the
width that are added to the stream. Hugging Face's models are meant with tie_word_embeddings=False,
which most prescriptions need; where one allows tied embeddings, leave the readout's rule out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from param_groups.roles import (
    PlanError,
    Role,
    Rule,
    assign,
    check_model,
    present,
)
from param_groups.stock import hugging_face

if TYPE_CHECKING:
    from torch import nn


def _each(role: Role, *patterns: str, trunk: bool | None = None) -> tuple[Rule, ...]:
    return tuple(Rule(pattern, role, trunk=trunk) for pattern in patterns)


def _outside(role: Role, *patterns: str) -> tuple[Rule, ...]:
    """Tensors outside of all residual branches, which a rule for the depth treats apart."""
    return _each(role, *patterns, trunk=True)


# A decoder put together from torch's own layers (nn.Embedding, nn.TransformerEncoderLayer or
# nn.TransformerDecoderLayer, nn.Linear), and nn.Transformer, nn.MultiheadAttention themselves.
TORCH_DECODER_RULES = (
    Rule("tokens.weight", Role.TOKEN_EMBEDDING),
    Rule("positions.weight", Role.POSITION_EMBEDDING),
    *_each(Role.QKV, "*in_proj_weight"),
    *_each(Role.QUERY, "*q_proj_weight"),
    *_each(Role.KEY, "*k_proj_weight"),
    *_each(Role.VALUE, "*v_proj_weight"),
    *_each(Role.ATTENTION_OUTPUT, "*_attn.out_proj.weight", "out_proj.weight"),
    *_each(Role.MLP_IN, "*linear1.weight"),
    *_each(Role.MLP_OUT, "*linear2.weight"),
    *_each(Role.HIDDEN_BIAS, "*in_proj_bias", "*out_proj.bias", "*linear?.bias", "bias_?"),
    *_each(Role.NORM_SCALE, "*norm?.weight"),
    *_each(Role.NORM_BIAS, "*norm?.bias"),
    *_each(Role.FINAL_NORM_SCALE, "*norm.weight"),
    *_outside(Role.NORM_BIAS, "*norm.bias"),
    Rule("readout.weight", Role.READOUT),
    Rule("readout.bias", Role.READOUT_BIAS),
)

# timm's VisionTransformer (vit, deit3, dinov2, siglip) and Eva (eva02). LayerScale
# starts at 1 here; `rules_for` puts the model's own start (deit3 1e-6, dinov2 1e-5) in its place.
TIMM_VIT_RULES = (
    Rule("patch_embed.proj.weight", Role.PATCH_EMBEDDING),
    *_each(Role.POSITION_EMBEDDING, "cls_token", "dist_token", "reg_token", "pos_embed"),
    *_each(Role.POSITION_EMBEDDING, "attn_pool.latent"),
    *_each(Role.QKV, "blocks.*.attn.qkv.weight"),
    *_each(Role.QUERY, "blocks.*.attn.q_proj.weight"),
    *_each(Role.KEY, "blocks.*.attn.k_proj.weight"),
    *_each(Role.VALUE, "blocks.*.attn.v_proj.weight"),
    *_each(Role.ATTENTION_OUTPUT, "blocks.*.attn.proj.weight"),
    *_each(Role.MLP_IN, *(f"blocks.*.mlp.{name}.weight" for name in ("fc1", "fc1_g", "fc1_x"))),
    *_each(Role.MLP_OUT, "blocks.*.mlp.fc2.weight"),
    *_each(Role.LAYER_SCALE, "blocks.*.gamma", "blocks.*.gamma_?"),
    *_each(Role.HIDDEN_BIAS, "blocks.*.attn.*_bias", "blocks.*.attn.*proj.bias"),
    *_each(Role.HIDDEN_BIAS, "blocks.*.attn.qkv.bias", "blocks.*.mlp.fc*.bias"),
    *_each(Role.NORM_SCALE, "blocks.*norm*.weight"),
    *_each(Role.NORM_BIAS, "blocks.*norm*.bias"),
    *_outside(Role.QUERY, "attn_pool.q.weight"),
    Rule("attn_pool.kv.weight", Role.HIDDEN, trunk=True, parts=(1, 1)),
    *_outside(Role.ATTENTION_OUTPUT, "attn_pool.proj.weight"),
    *_outside(Role.MLP_IN, "attn_pool.mlp.fc1.weight"),
    *_outside(Role.MLP_OUT, "attn_pool.mlp.fc2.weight"),
    *_outside(Role.HIDDEN_BIAS, "patch_embed.proj.bias", "attn_pool.*q.bias", "attn_pool.kv.bias"),
    *_outside(Role.HIDDEN_BIAS, "attn_pool.proj.bias", "attn_pool.mlp.fc?.bias"),
    *_outside(Role.NORM_SCALE, "norm_pre.weight", "patch_embed.*norm*.weight"),
    *_outside(Role.NORM_SCALE, "attn_pool.*norm*.weight"),
    *_outside(Role.NORM_BIAS, "norm*.bias", "fc_norm.bias", "patch_embed.*norm*.bias"),
    *_outside(Role.NORM_BIAS, "attn_pool.*norm*.bias"),
    *_each(Role.FINAL_NORM_SCALE, "norm.weight", "fc_norm.weight"),
    *_each(Role.READOUT, "head.weight", "head_dist.weight"),
    *_each(Role.READOUT_BIAS, "head.bias", "head_dist.bias"),
)

# timm's ConvNeXt and ConvNeXt-V2: a width per stage, so plan with `base`.
CONVNEXT_RULES = (
    Rule("stem.0.weight", Role.PATCH_EMBEDDING),
    *_each(Role.DEPTHWISE, "*.conv_dw.weight"),
    *_each(Role.MLP_IN, "*.mlp.fc1.weight"),
    *_each(Role.MLP_OUT, "*.mlp.fc2.weight"),
    *_each(Role.HIDDEN, "stages.*.downsample.1.weight", "*.shortcut.weight"),
    Rule("*.gamma", Role.LAYER_SCALE, scale=1e-6),  # timm's ls_init_value
    *_each(Role.HIDDEN_BIAS, "stem.0.bias", "*.conv_dw.bias", "*.mlp.fc?.bias"),
    *_each(Role.HIDDEN_BIAS, "stages.*.downsample.1.bias"),
    *_each(Role.NORM_SCALE, "stem.1.weight", "*norm.weight", "stages.*.downsample.0.weight"),
    *_each(Role.NORM_BIAS, "stem.1.bias", "*norm.bias", "stages.*.downsample.0.bias", "*.grn.*"),
    Rule("head.fc.weight", Role.READOUT),
    Rule("head.fc.bias", Role.READOUT_BIAS),
)

# timm's Swin: a width per stage, so plan with `base`.
SWIN_RULES = (
    Rule("patch_embed.proj.weight", Role.PATCH_EMBEDDING),
    *_each(Role.RELATIVE_POSITION, "*.relative_position_bias_table"),
    *_each(Role.QKV, "*.attn.qkv.weight"),
    *_each(Role.ATTENTION_OUTPUT, "*.attn.proj.weight"),
    *_each(Role.MLP_IN, "*.mlp.fc1.weight"),
    *_each(Role.MLP_OUT, "*.mlp.fc2.weight"),
    *_each(Role.HIDDEN, "*.downsample.reduction.weight"),
    *_each(Role.HIDDEN_BIAS, "*.proj.bias", "*.qkv.bias", "*.fc1.bias", "*.fc2.bias"),
    *_each(Role.NORM_SCALE, "*norm*.weight"),
    *_each(Role.NORM_BIAS, "*norm*.bias"),
    Rule("head.fc.weight", Role.READOUT),
    Rule("head.fc.bias", Role.READOUT_BIAS),
)

# Karpathy's nanoGPT, and its likes that keep GPT-2's names over nn.Linear.
NANOGPT_RULES = (
    Rule("transformer.wte.weight", Role.TOKEN_EMBEDDING),
    Rule("transformer.wpe.weight", Role.POSITION_EMBEDDING),
    Rule("*.attn.c_attn.weight", Role.QKV),
    Rule("*.attn.c_proj.weight", Role.ATTENTION_OUTPUT),
    Rule("*.mlp.c_fc.weight", Role.MLP_IN),
    Rule("*.mlp.c_proj.weight", Role.MLP_OUT),
    *_each(Role.HIDDEN_BIAS, "*.c_attn.bias", "*.c_proj.bias", "*.c_fc.bias"),
    Rule("*.h.*.ln_?.weight", Role.NORM_SCALE),
    Rule("*.h.*.ln_?.bias", Role.NORM_BIAS),
    Rule("transformer.ln_f.weight", Role.FINAL_NORM_SCALE),
    Rule("transformer.ln_f.bias", Role.NORM_BIAS, trunk=True),
    Rule("lm_head.weight", Role.READOUT),
)

# The factors that peft puts beside a frozen model's matrices: name them along with the model's own
# rules, whose patterns that begin with a module's name need "base_model.model." before it.
LORA_RULES = (Rule("*.lora_A.*", Role.LORA_A), Rule("*.lora_B.*", Role.LORA_B))

CATALOGUE: dict[str, tuple[Rule, ...]] = {
    "TORCH_DECODER_RULES": TORCH_DECODER_RULES,
    "TIMM_VIT_RULES": TIMM_VIT_RULES,
    "CONVNEXT_RULES": CONVNEXT_RULES,
    "SWIN_RULES": SWIN_RULES,
    "NANOGPT_RULES": NANOGPT_RULES,
}


def fitting(model: nn.Module) -> dict[str, list[Rule]]:
    """The lists of the catalogue that name every tensor of a model, by their names; a list whose
    layouts the model's layers contradict does not fit."""
    from param_groups.model.read import layout_problem

    found = {}
    for name, rules in CATALOGUE.items():
        try:
            chosen = _tied_once(present(rules, model), model)
            assignments = assign(model, chosen)
        except PlanError:
            continue
        if not any(layout_problem(model, assignment) for assignment in assignments):
            found[name] = chosen
    return found


def _tied_once(rules: Sequence[Rule], model: nn.Module) -> list[Rule]:
    """The rules without that of a readout which is the word embedding, whose rule names it too."""
    named = [*model.named_parameters(remove_duplicate=False)]
    tables = [rule for rule in rules if rule.role is Role.TOKEN_EMBEDDING]
    tied = {id(p) for name, p in named if any(rule.matches(name) for rule in tables)}

    def is_tied(rule: Rule) -> bool:
        return all(id(p) in tied for name, p in named if rule.matches(name))

    return [rule for rule in rules if not (rule.role is Role.READOUT and is_tied(rule))]


def rules_for(model: nn.Module) -> list[Rule]:
    """The rules of a library's model.

    Of Hugging Face's models two small ones of the same class and config are traced, once per
    config. timm's and torch's do not say what they were built with, so they have lists by name. A
    LayerScale starts where its module says, or at the number that fills it: its rule's `scale`.

    Args:
        model: a model of Hugging Face, timm, torch or nanoGPT; it is only read. Of a tied one
            the embedding's rule names both, and `plan` refuses what gives the two other numbers.

    Returns:
        Rules for every tensor of the model, without any that match nothing.

    Raises:
        PlanError: no list fits, or several do; a model of Hugging Face's that cannot be traced, or
            has other tensors than its config says; a LayerScale on the meta device, or after
            training, whose module does not say where it starts.

    Source: `traced`; `CATALOGUE`, whose verdicts are in stock/models.md.

    >>> from torch import nn
    >>> [str(rule.role) for rule in rules_for(nn.MultiheadAttention(16, 2, bias=False))]
    ['qkv', 'attention_output']
    """
    from param_groups.model.read import gates

    check_model(model)
    if hugging_face.is_hugging_faces(model):
        rules = present(hugging_face.traced_rules(model), model)
        assign(model, rules)
        return rules
    found = fitting(model)
    if len(found) == 1:
        ((name, rules),) = found.items()
        gated = gates(assign(model, rules)) if name == "TIMM_VIT_RULES" else ()
        halved = [  # a gate and what it gates in one matrix, one after the other
            replace(rule, parts=(1, 1)) if any(map(rule.matches, gated)) else rule for rule in rules
        ]
        scales = Role.LAYER_SCALE
        return [_started(rule, model, name) if rule.role is scales else rule for rule in halved]
    fit = " and ".join(found) if found else "none"
    raise PlanError(
        f"of the shipped rules {fit} fit {type(model).__name__}; traced(build, run).rules has "
        "those of any model"
    )


def _started(rule: Rule, model: nn.Module, catalogue: str) -> Rule:
    """A LayerScale's rule with the value at which the model's own LayerScales start."""
    scales = {name: p for name, p in model.named_parameters() if rule.matches(name)}
    starts = {_start(name, p, model) for name, p in scales.items()}
    if len(starts) == 1 and (start := starts.pop()) is not None:
        return replace(rule, scale=start)
    first = next(iter(scales))
    why = "is on the meta device" if scales[first].is_meta else "and its likes hold several numbers"
    raise PlanError(
        f"where the LayerScales of {type(model).__name__} start cannot be read: {first!r} {why}. "
        "Take the rules of an untrained model of any size off the meta device, or present("
        f"{catalogue}, model) of param_groups.stock.rules, where they start at {rule.scale:g}"
    )


def _start(name: str, scale: nn.Parameter, model: nn.Module) -> float | None:
    """The number with which a module says its LayerScale starts, or which fills it; else None."""
    initial = getattr(model.get_submodule(name.rpartition(".")[0]), "init_values", None)
    if isinstance(initial, float):
        return initial
    if scale.is_meta:
        return None
    values = (scale.full_tensor() if hasattr(scale, "full_tensor") else scale).detach().unique()
    # Seven digits: 1e-6 as float32 has it is 1e-6 again.
    return float(f"{values.item():.7g}") if len(values) == 1 else None


def stock(name: str, **sizes: object) -> nn.Module:
    """A stock model from its config, untied, with values of its own; nothing is downloaded.

    "hf:gpt2" is the model type of a Hugging Face config, whose keys `sizes` sets; "timm:vit_tiny_
    patch16_224" a name of timm's, with arguments of `timm.create_model`. Under
    `torch.device("meta")` it takes no memory. Raises PlanError for an unknown name or key.
    """
    library, _, kind = name.partition(":")
    build = {"hf": _hugging_face, "timm": _timm}.get(library)
    if build is None or not kind:
        raise PlanError(f"unknown model {name!r}; write hf:gpt2 or timm:vit_tiny_patch16_224")
    try:
        return build(kind, sizes)
    except ImportError as error:
        raise PlanError(f"{name}: {error.name} is not installed") from None
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(f"{name}: cannot build it from its config: {reason[:150]}") from None


def _hugging_face(kind: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{"tie_word_embeddings": False, **sizes})
    # T5's config answers with True to whatever it was given.
    config.tie_word_embeddings = sizes.get("tie_word_embeddings", False)
    for task in ("Seq2SeqLM", "SpeechSeq2Seq", "MaskedLM", "CausalLM", "ImageClassification"):
        try:
            auto = getattr(transformers, f"AutoModelFor{task}")
            model: nn.Module = auto.from_config(config)
            return model
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
    raise ValueError("is neither a language model nor an image or speech model")


def _timm(kind: str, sizes: dict[str, Any]) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(kind, pretrained=False, **sizes)
    return model
