"""Rules of Hugging Face's models as they were written by hand, tensor by tensor: what traces of
them are held against."""

from param_groups.roles import Layout, Role, Rule


def _each(role: Role, *patterns: str, trunk: bool | None = None) -> tuple[Rule, ...]:
    return tuple(Rule(pattern, role, trunk=trunk) for pattern in patterns)


def _outside(role: Role, *patterns: str) -> tuple[Rule, ...]:
    """Tensors outside of all residual branches, which a rule for the depth treats apart."""
    return _each(role, *patterns, trunk=True)


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

LISTS = {
    "GPT2": GPT2_RULES,
    "LLAMA": LLAMA_RULES,
    "GEMMA": GEMMA_RULES,
    "GPT_NEOX": GPT_NEOX_RULES,
    "BERT": BERT_RULES,
    "T5": T5_RULES,
    "HF_VIT": HF_VIT_RULES,
    "WHISPER": WHISPER_RULES,
}
