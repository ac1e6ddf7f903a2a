"""Rules of models that many people have; `rules_for(model)` finds the list that fits a model.

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
    Assignment,
    Layout,
    PlanError,
    Role,
    Rule,
    assign,
    check_model,
    present,
)
from param_groups.stock.suggest import norm_guess

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

# Hugging Face's GPT-2, whose Conv1D stores (in, out).
GPT2_RULES = (
    Rule("transformer.wte.weight", Role.TOKEN_EMBEDDING),
    Rule("transformer.wpe.weight", Role.POSITION_EMBEDDING),
    Rule("*.attn.c_attn.weight", Role.QKV, Layout.TRANSPOSED),
    Rule("*.attn.c_proj.weight", Role.ATTENTION_OUTPUT, Layout.TRANSPOSED),
    Rule("*.mlp.c_fc.weight", Role.MLP_IN, Layout.TRANSPOSED),
    Rule("*.mlp.c_proj.weight", Role.MLP_OUT, Layout.TRANSPOSED),
    *_each(Role.HIDDEN_BIAS, "*.c_attn.bias", "*.c_proj.bias", "*.c_fc.bias"),
    Rule("*.h.*.ln_?.weight", Role.NORM_SCALE),
    Rule("*.h.*.ln_?.bias", Role.NORM_BIAS),
    Rule("transformer.ln_f.weight", Role.FINAL_NORM_SCALE),
    Rule("transformer.ln_f.bias", Role.NORM_BIAS, trunk=True),
    Rule("lm_head.weight", Role.READOUT),
)

# Karpathy's nanoGPT: nn.Linear, which stores (out, in), under GPT-2's names.
NANOGPT_RULES = tuple(replace(rule, layout=None) for rule in GPT2_RULES)

_LLAMA_MATRICES = (
    Rule("model.embed_tokens.weight", Role.TOKEN_EMBEDDING),
    Rule("*.self_attn.q_proj.weight", Role.QUERY),
    Rule("*.self_attn.k_proj.weight", Role.KEY),
    Rule("*.self_attn.v_proj.weight", Role.VALUE),
    Rule("*.self_attn.o_proj.weight", Role.ATTENTION_OUTPUT),
    *_each(Role.MLP_IN, "*.mlp.gate_proj.weight", "*.mlp.up_proj.weight"),
    Rule("*.mlp.down_proj.weight", Role.MLP_OUT),
    *_each(Role.ROUTER, "*.mlp.gate.weight", "*_moe.router.weight"),
    Rule("*.experts.gate_up_proj", Role.MLP_IN, Layout.EXPERTS, parts=(1, 1)),
    Rule("*.experts.down_proj", Role.MLP_OUT, Layout.EXPERTS),
    Rule("*_proj.bias", Role.HIDDEN_BIAS),
    Rule("lm_head.weight", Role.READOUT),
)

# Hugging Face's Llama and its likes: Mistral, Qwen2 (biases), Qwen3 (norms of queries and keys),
# Mixtral with its router and experts; Granite, GraniteMoE and HyperCLOVA X, whose configs hold
# factors, among them the residual multiplier of a rule for the depth.
LLAMA_RULES = (
    *_LLAMA_MATRICES,
    *_each(Role.NORM_SCALE, "model.layers.*norm.weight", "model.layers.*norm?.weight"),
    Rule("model.norm.weight", Role.FINAL_NORM_SCALE),
)

# Gemma 1 to 3. Their norms multiply by 1 + weight, so the weight starts at 0, as a bias does; and
# they multiply word embeddings by the root of the width: set `embed_scale` of embed_tokens to 1.
GEMMA_RULES = (
    *_LLAMA_MATRICES,
    Rule("model.layers.*norm.weight", Role.NORM_BIAS),
    Rule("model.norm.weight", Role.NORM_BIAS, trunk=True),
)

GPT_NEOX_RULES = (
    Rule("gpt_neox.embed_in.weight", Role.TOKEN_EMBEDDING),
    Rule("*.attention.query_key_value.weight", Role.QKV, parts=()),  # head by head
    Rule("*.attention.dense.weight", Role.ATTENTION_OUTPUT),
    Rule("*.mlp.dense_h_to_4h.weight", Role.MLP_IN),
    Rule("*.mlp.dense_4h_to_h.weight", Role.MLP_OUT),
    *_each(Role.HIDDEN_BIAS, "*.query_key_value.bias", "*.dense.bias", "*.dense_*.bias"),
    *_each(Role.NORM_SCALE, "*.layers.*norm.weight"),
    *_each(Role.NORM_BIAS, "*.layers.*norm.bias"),
    Rule("gpt_neox.final_layer_norm.weight", Role.FINAL_NORM_SCALE),
    *_outside(Role.NORM_BIAS, "gpt_neox.final_layer_norm.bias"),
    Rule("lm_head.weight", Role.READOUT),
)

# Hugging Face's BERT and RoBERTa with their masked-language and classification heads.
BERT_RULES = (
    Rule("*.embeddings.word_embeddings.weight", Role.TOKEN_EMBEDDING),
    *_each(Role.POSITION_EMBEDDING, "*.position_embeddings.weight"),
    *_each(Role.POSITION_EMBEDDING, "*.token_type_embeddings.weight"),
    Rule("*.attention.self.query.weight", Role.QUERY),
    Rule("*.attention.self.key.weight", Role.KEY),
    Rule("*.attention.self.value.weight", Role.VALUE),
    Rule("*.attention.output.dense.weight", Role.ATTENTION_OUTPUT),
    Rule("*.intermediate.dense.weight", Role.MLP_IN),
    *_each(Role.MLP_OUT, "*.layer.?.output.dense.weight", "*.layer.??.output.dense.weight"),
    *_outside(Role.HIDDEN, "*.transform.dense.weight", "*.pooler.dense.weight"),
    *_outside(Role.HIDDEN, "lm_head.dense.weight", "classifier.dense.weight"),
    *_each(Role.HIDDEN_BIAS, "*.layer.*.dense.bias", "*.query.bias", "*.key.bias", "*.value.bias"),
    *_outside(Role.HIDDEN_BIAS, "*.transform.dense.bias", "*.pooler.dense.bias"),
    *_outside(Role.HIDDEN_BIAS, "lm_head.dense.bias", "classifier.dense.bias"),
    Rule("*.layer.*.LayerNorm.weight", Role.NORM_SCALE),
    Rule("*.layer.*.LayerNorm.bias", Role.NORM_BIAS),
    *_outside(Role.NORM_SCALE, "*.embeddings.LayerNorm.weight"),
    *_outside(Role.NORM_BIAS, "*.embeddings.LayerNorm.bias"),
    *_each(Role.FINAL_NORM_SCALE, "*.transform.LayerNorm.weight", "lm_head.layer_norm.weight"),
    *_outside(Role.NORM_BIAS, "*.transform.LayerNorm.bias", "lm_head.layer_norm.bias"),
    *_each(Role.READOUT, "*.decoder.weight", "classifier.weight", "classifier.out_proj.weight"),
    *_each(Role.READOUT_BIAS, "*.decoder.bias", "cls.predictions.bias", "lm_head.bias"),
    *_each(Role.READOUT_BIAS, "classifier.bias", "classifier.out_proj.bias"),
)

# T5 does not scale attention logits by a power of the head dimension: its initial queries have that
# factor, in a plan as in the library.
# A config made with tie_word_embeddings=False stops scaling logits by n^(-1/2) but still ties the
# embeddings: set config.tie_word_embeddings = False before the model is built from it.
T5_RULES = (
    *_each(Role.TOKEN_EMBEDDING, "shared.weight", "*coder.embed_tokens.weight"),
    Rule("*Attention.q.weight", Role.QUERY),
    Rule("*Attention.k.weight", Role.KEY),
    Rule("*Attention.v.weight", Role.VALUE),
    Rule("*Attention.o.weight", Role.ATTENTION_OUTPUT),
    Rule("*.relative_attention_bias.weight", Role.RELATIVE_POSITION),
    *_each(Role.MLP_IN, "*.wi.weight", "*.wi_?.weight"),
    Rule("*.wo.weight", Role.MLP_OUT),
    Rule("*.layer.*.layer_norm.weight", Role.NORM_SCALE),
    Rule("*.final_layer_norm.weight", Role.FINAL_NORM_SCALE),
    Rule("lm_head.weight", Role.READOUT),
)

HF_VIT_RULES = (
    *_each(Role.POSITION_EMBEDDING, "*.cls_token", "*.mask_token", "*.position_embeddings"),
    Rule("*.patch_embeddings.projection.weight", Role.PATCH_EMBEDDING),
    Rule("*.attention.q_proj.weight", Role.QUERY),
    Rule("*.attention.k_proj.weight", Role.KEY),
    Rule("*.attention.v_proj.weight", Role.VALUE),
    Rule("*.attention.o_proj.weight", Role.ATTENTION_OUTPUT),
    Rule("*.mlp.fc1.weight", Role.MLP_IN),
    Rule("*.mlp.fc2.weight", Role.MLP_OUT),
    *_outside(Role.HIDDEN_BIAS, "*.projection.bias"),
    *_each(Role.HIDDEN_BIAS, "*_proj.bias", "*.fc1.bias", "*.fc2.bias"),
    *_each(Role.NORM_SCALE, "*.layernorm_*.weight"),
    *_each(Role.NORM_BIAS, "*.layernorm_*.bias"),
    *_each(Role.FINAL_NORM_SCALE, "*.layernorm.weight"),
    *_outside(Role.NORM_BIAS, "*.layernorm.bias"),
    Rule("classifier.weight", Role.READOUT),
    Rule("classifier.bias", Role.READOUT_BIAS),
)

# Whisper's first convolution reads the spectrogram; the encoder's sinusoids are frozen.
WHISPER_RULES = (
    Rule("model.decoder.embed_tokens.weight", Role.TOKEN_EMBEDDING),
    *_each(Role.POSITION_EMBEDDING, "model.*.embed_positions.weight"),
    Rule("model.encoder.conv1.weight", Role.PATCH_EMBEDDING),
    Rule("model.encoder.conv2.weight", Role.HIDDEN, trunk=True),
    Rule("*_attn.q_proj.weight", Role.QUERY),
    Rule("*_attn.k_proj.weight", Role.KEY),
    Rule("*_attn.v_proj.weight", Role.VALUE),
    Rule("*_attn.out_proj.weight", Role.ATTENTION_OUTPUT),
    Rule("*.fc1.weight", Role.MLP_IN),
    Rule("*.fc2.weight", Role.MLP_OUT),
    *_outside(Role.HIDDEN_BIAS, "*.conv?.bias"),
    *_each(Role.HIDDEN_BIAS, "*_proj.bias", "*.fc?.bias"),
    *_each(Role.NORM_SCALE, "*.layers.*layer_norm.weight"),
    *_each(Role.NORM_BIAS, "*.layers.*layer_norm.bias"),
    *_each(Role.FINAL_NORM_SCALE, "model.*coder.layer_norm.weight"),
    *_outside(Role.NORM_BIAS, "model.*coder.layer_norm.bias"),
    Rule("proj_out.weight", Role.READOUT),
)

# The factors that peft puts beside a frozen model's matrices: name them along with the model's own
# rules, whose patterns that begin with a module's name need "base_model.model." before it.
LORA_RULES = (Rule("*.lora_A.*", Role.LORA_A), Rule("*.lora_B.*", Role.LORA_B))

CATALOGUE: dict[str, tuple[Rule, ...]] = {
    "TORCH_DECODER_RULES": TORCH_DECODER_RULES,
    "TIMM_VIT_RULES": TIMM_VIT_RULES,
    "CONVNEXT_RULES": CONVNEXT_RULES,
    "SWIN_RULES": SWIN_RULES,
    "GPT2_RULES": GPT2_RULES,
    "NANOGPT_RULES": NANOGPT_RULES,
    "LLAMA_RULES": LLAMA_RULES,
    "GEMMA_RULES": GEMMA_RULES,
    "GPT_NEOX_RULES": GPT_NEOX_RULES,
    "BERT_RULES": BERT_RULES,
    "T5_RULES": T5_RULES,
    "HF_VIT_RULES": HF_VIT_RULES,
    "WHISPER_RULES": WHISPER_RULES,
}


def fitting(model: nn.Module) -> dict[str, list[Rule]]:
    """The lists of the catalogue that name every tensor of a model, by their names.

    Names are not enough. Gemma's tensors have those of Llama's: whether a norm multiplies by its
    weight or by 1 more is found out by calling it. nanoGPT's have those of Hugging Face's GPT-2,
    whose layers store their matrices transposed.
    """
    from param_groups.model.read import layout_problem

    found = {}
    for name, rules in CATALOGUE.items():
        try:
            chosen = _tied_once(present(rules, model), model)
            assignments = assign(model, chosen)
        except PlanError:
            continue
        contradicted = any(layout_problem(model, assignment) for assignment in assignments)
        if not contradicted and _norms_agree(model, assignments):
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


def _norms_agree(model: nn.Module, assignments: Sequence[Assignment]) -> bool:
    """Whether norm weights that start at 1 have a scale's role, and those at 0 a bias's."""
    for assignment in assignments:
        path, _, own = assignment.name.rpartition(".")
        module = model.get_submodule(path)
        if own == "weight" and "norm" in type(module).__name__.lower():
            guess = norm_guess(own, module)
            starts_at_one = assignment.role in (Role.NORM_SCALE, Role.FINAL_NORM_SCALE)
            if not guess.doubt and (guess.role is Role.NORM_SCALE) != starts_at_one:
                return False
    return True


def rules_for(model: nn.Module) -> list[Rule]:
    """The shipped rules of a model.

    A LayerScale starts where its module says, or at the number that fills it: its rule's `scale`.

    Args:
        model: a model of Hugging Face, timm, torch or nanoGPT; it is only read. Of a tied one
            the embedding's rule names both, and `plan` refuses what gives the two other numbers.

    Returns:
        The one list of the catalogue that names every tensor, without rules that match nothing.

    Raises:
        PlanError: no list fits, or several do; a LayerScale on the meta device, or after training,
            whose module does not say where it starts.

    Source: `CATALOGUE`, whose verdicts are in stock/models.md.

    >>> from torch import nn
    >>> [str(rule.role) for rule in rules_for(nn.MultiheadAttention(16, 2, bias=False))]
    ['qkv', 'attention_output']
    """
    from param_groups.model.read import gates

    check_model(model)
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
        f"of the shipped rules {fit} fit {type(model).__name__}; print(suggest(model)) has rules "
        "to look over"
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
