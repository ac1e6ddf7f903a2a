"""`suggest(model)`: a rule list to look over and paste, guessed from types, names and shapes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from param_groups.models import fitting
from param_groups.roles import Role

if TYPE_CHECKING:
    from torch import nn

# The first expression that is found in a matrix's name (lower case) is its role.
_NAMES = (
    (r"lora_a", Role.LORA_A),
    (r"lora_b", Role.LORA_B),
    (r"relative", Role.RELATIVE_POSITION),
    (r"router|mlp\.gate\.", Role.ROUTER),
    (r"qkv|c_attn|in_proj|query_key_value", Role.QKV),
    (r"lm_head|readout|classifier|(^|\.)head\b|proj_out|unembed", Role.READOUT),
    (r"(^|[._])(q|query|wq)([._]|$|_proj)", Role.QUERY),
    (r"(^|[._])(k|key|wk)([._]|$|_proj)", Role.KEY),
    (r"(^|[._])(v|value|wv)([._]|$|_proj)", Role.VALUE),
    (r"o_proj|out_proj|attn\.(proj|out|output)|attention\.(dense|output|out)|wo\b",
        Role.ATTENTION_OUTPUT),
    (r"down|fc2|c_proj|linear2|w2\b|4h_to_h|output\.dense", Role.MLP_OUT),
    (r"up|gate|fc1|c_fc|linear1|w1\b|w3\b|h_to_4h|intermediate", Role.MLP_IN),
)  # fmt: skip


def suggest(model: nn.Module) -> str:
    """Rules for a model as code to paste; lines that end in "?" are guesses from little.

    Where shipped rules fit, they are named instead. Nothing is applied: read the roles, as a wrong
    one is a silently wrong learning rate.
    """
    if found := fitting(model):
        name = next(iter(found))
        return f"from param_groups import present\nfrom param_groups.models import {name}\n\n" + (
            f"rules = present({name}, model)"
        )
    last = max((i for i, (_, p) in enumerate(model.named_parameters()) if p.ndim > 1), default=-1)
    lines: dict[str, str] = {}
    for index, (name, parameter) in enumerate(model.named_parameters()):
        role, sure = _guess(model, name, parameter, index == last)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        layout = ', "transposed"' if _is_transposed(model, name) else ""
        shape = "x".join(map(str, parameter.shape)) + ("" if sure else " ?")
        lines.setdefault(pattern, f'    Rule("{pattern}", "{role}"{layout}),  # {shape}')
    return "\n".join(["from param_groups import Rule", "", "rules = [", *lines.values(), "]"])


def _guess(model: nn.Module, name: str, parameter: nn.Parameter, last: bool) -> tuple[Role, bool]:
    """(role, whether type or name say so plainly)."""
    from torch import nn

    path, _, leaf = name.rpartition(".")
    layer, low = model.get_submodule(path), name.lower()
    if "norm" in type(layer).__name__.lower() or re.search(r"norm|(^|\.)ln", path.lower()):
        return (Role.NORM_BIAS if leaf == "bias" else Role.NORM_SCALE), True
    if isinstance(layer, nn.Embedding):
        positions = re.search(r"pos|type|wpe", low)
        return (Role.POSITION_EMBEDDING if positions else Role.TOKEN_EMBEDDING), True
    if parameter.ndim == 1 and "bias" in leaf:
        readout = re.search(_NAMES[5][0], low)
        return (Role.READOUT_BIAS if readout else Role.HIDDEN_BIAS), bool(readout) or "." in name
    if leaf.startswith("gamma"):
        return Role.LAYER_SCALE, True
    if parameter.ndim == 1 or "token" in leaf or "pos" in leaf:
        return (Role.NORM_SCALE if parameter.ndim == 1 else Role.POSITION_EMBEDDING), False
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        if layer.groups > 1:
            return Role.DEPTHWISE, True
        return (Role.PATCH_EMBEDDING if layer.in_channels <= 4 else Role.HIDDEN), False
    for expression, role in _NAMES:
        if re.search(expression, low):
            return role, True
    return (Role.READOUT if last else Role.HIDDEN), False


def _is_transposed(model: nn.Module, name: str) -> bool:
    layer = model.get_submodule(name.rpartition(".")[0])
    return type(layer).__name__ == "Conv1D" and name.endswith("weight")
