"""A first list of rules for any model: a guess to read, correct and paste, never applied unseen.

    print(suggest(model))
    param-groups suggest hf:gpt2

A role follows from a module's type, its name and its shapes. Whatever they do not settle between
them is marked with `# check:` and the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from param_groups.roles import Layout, Role, Rule, check_model
from param_groups.stock.factors import held

if TYPE_CHECKING:  # torch is imported with the first suggestion
    import torch
    from torch import nn

# What the last words of a module's name say, most telling first. Matched from a dot to the end.
_NAMES: tuple[tuple[Role, str], ...] = (
    (Role.LORA_A, r"lora_a(\.\w+)?"),
    (Role.LORA_B, r"lora_b(\.\w+)?"),
    (Role.ROUTER, r"router(\.\w+)?|shared_experts?_gate"),
    (Role.QKV, r"c_attn|w?qkv|qkv_proj|query_key_value|in_proj_weight"),
    (Role.QUERY, r"q|query|wq|to_q|q_proj(_weight)?"),
    (Role.KEY, r"k|key|wk|to_k|k_proj(_weight)?"),
    (Role.VALUE, r"v|value|wv|to_v|v_proj(_weight)?"),
    (
        Role.MLP_IN,
        r"(c_)?fc_?1(_\w)?|c_fc|(up|gate|gate_up)(_proj)?|w[13]|wi(_\d)?|linear1|"
        r"dense_h_to_4h|intermediate\.dense",
    ),
    (Role.MLP_OUT, r"(c_)?fc_?2|down(_proj)?|w2|linear2|dense_4h_to_h"),
    (
        Role.READOUT,
        r"(lm_)?head(\.fc|\.decoder)?|head_dist|classifier|proj_out|readout|unembed|"
        r"embed_out|score|predictions\.decoder",
    ),
)
_BLOCK_END = r"o|wo|o_proj|out_proj|c_proj|proj|dense|output|out|output\.dense"
# What a matrix of an MLP outside of all numbered blocks may be, as in a model that is one MLP.
_OUTSIDE = {
    Role.MLP_IN: "PATCH_EMBEDDING if its inputs do not grow with the width",
    Role.MLP_OUT: "READOUT if its outputs do not grow with the width",
}
_TOKENS = ("tok", "wte", "word", "embed_in", "shared")
_ADDED = (
    "pos wpe type segment latent bias_k bias_v cls_token dist_token reg_token mask_token".split()
)


@dataclass(frozen=True)
class Guess:
    """A role and layout for one tensor; `doubt` says what is to be checked, empty if nothing."""

    role: Role
    layout: Layout | None = None
    doubt: str = ""


@dataclass(frozen=True)
class Suggestion:
    """Rules that name every tensor of a model once; str() is code to paste.

    `doubts` gives, for a rule's pattern, what is to be checked before it is used.
    """

    rules: tuple[Rule, ...]
    doubts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = ["from param_groups import Layout, Role, Rule", "", "RULES = ("]
        for rule in self.rules:
            layout = f", Layout.{rule.layout.name}" if rule.layout else ""
            doubt = self.doubts.get(rule.pattern)
            note = f"  # check: {doubt}" if doubt else ""
            pattern = json.dumps(rule.pattern)  # a Python text, too, whatever the name
            lines.append(f"    Rule({pattern}, Role.{rule.role.name}{layout}),{note}")
        return "\n".join([*lines, ")"])


def suggest(model: nn.Module) -> Suggestion:
    """A guess at the rules of a model, to look over and paste.

    Args:
        model: unwrapped and uncompiled, on any device or "meta"; it is only read.

    Returns:
        Rules that name every tensor once; `print` shows code, with doubts as `# check:`.

    Raises:
        PlanError: what is no model, and one inside a wrapper.

    Source: names and shapes of the libraries' models, tests/param_groups/test_suggest.py.

    >>> from torch import nn
    >>> rules = suggest(nn.ModuleDict({"norm": nn.LayerNorm(8)})).rules
    >>> [(rule.pattern, str(rule.role)) for rule in rules]
    [('norm.weight', 'norm_scale'), ('norm.bias', 'norm_bias')]
    """
    check_model(model)
    guesses: dict[str, Guess] = {}
    names: dict[int, str] = {}
    modules = dict(model.named_modules())
    paths = [*dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters())]
    inside = [i for i, path in enumerate(paths) if re.search(r"(^|\.)\d+\.", path)]
    before = {*paths[: inside[0] if inside else len(paths) > 1]}  # the blocks
    after = paths[inside[-1] + 1 :] if inside else []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first := names.setdefault(id(parameter), name) if id(parameter) in names else None:
            doubt = f"tied to {name}; most prescriptions need tie_word_embeddings=False"
            guesses[first] = Guess(guesses[first].role, guesses[first].layout, doubt)
            continue
        names[id(parameter)] = name
        path, _, own = name.rpartition(".")
        module = modules[path]
        if parameter.ndim == 3 and "expert" in path:
            guesses[name] = _experts(own, module, modules[path.rpartition(".")[0]])
            continue
        plain = path.replace(".base_layer", "")  # where peft puts the layer that it adapts
        guesses[name] = _guess(plain, own, module, parameter, path in before)
        if re.search(r"(^|\.)(gate|gating|wg)$", path):
            beside = modules[path.rpartition(".")[0]].named_children()
            chooses = any("expert" in child for child, _ in beside)
            guesses[name] = _gate(own, guesses[name], chooses, parameter)
    norms = [name for name, guess in guesses.items() if guess == Guess(Role.NORM_SCALE)]
    last = [name for name in norms if name.rpartition(".")[0] in after]
    if len(last) == 1:
        guesses[last[0]] = Guess(Role.FINAL_NORM_SCALE)
    for one in held(model):
        if one.factor == "attention_scale" and not one.queries and one.value in (None, 1.0):
            says = "its attention does not say what it multiplies query-key products by"
            if one.value is not None:
                says = "its attention multiplies query-key products by 1"
            doubt = f"{says}: plan with applied={{'attention_scale': ...}}"
            for name, guess in guesses.items():
                if name.startswith(f"{one.path}.") and guess.role in (Role.QUERY, Role.QKV):
                    guesses[name] = replace(guess, doubt=guess.doubt or doubt)
    for name, parameter in model.named_parameters():
        guesses[name] = _compared(guesses[name], parameter)
    return _as_rules(guesses)


def _compared(guess: Guess, parameter: torch.Tensor) -> Guess:
    """The guess, with a doubt where a plan would give a tensor another start than it has."""
    if guess.role.facts.layout is Layout.VECTOR and sum(n > 1 for n in parameter.shape) > 1:
        guess = replace(guess, layout=Layout.VECTOR)
    if parameter.is_meta or hasattr(parameter, "device_mesh") or not parameter.is_floating_point():
        return guess
    values = parameter.detach().flatten()
    constant = bool((values[:999] == values[0]).all()) and bool((values == values[0]).all())
    says, start = "", 1.0 if guess.role.facts.start == "one" else 0.0
    if guess.role.facts.layout is Layout.VECTOR:
        if constant and values[0] != start:
            says = f"is {values[0]:.4g} in your model, and would start at {start:g}"
        elif not constant and (rms := float((values.float() - start).square().mean().sqrt())) > 0.5:
            says = f"is {rms:.2g} away from {start:g} in your model, where it would start"
    elif constant and not (guess.role is Role.LORA_B and values[0] == 0):
        says = f"is {values[0]:.4g} in all entries of your model, and would be drawn at random"
    return replace(guess, doubt="; ".join(filter(None, (guess.doubt, says))))


def _gate(own: str, guess: Guess, chooses: bool, parameter: torch.Tensor) -> Guess:
    """A module called gate: the router next to experts, else perhaps the gate of an MLP."""
    if own == "bias":
        return Guess(Role.READOUT_BIAS, None, "a router's bias") if chooses else guess
    if chooses:
        return Guess(Role.ROUTER)
    few = parameter.ndim == 2 and parameter.shape[0] < parameter.shape[1]
    return Guess(Role.ROUTER, None, "a router, or an MLP's gate?") if few else guess


def _experts(own: str, module: nn.Module, mixture: nn.Module) -> Guess:
    """A stack of matrices, one per expert; the width that the router reads says which axis is in.

    All stacks of a module are stored alike, so a square one follows the others.
    """
    from torch import nn

    role = _named(own)
    if role not in (Role.MLP_IN, Role.MLP_OUT):
        return Guess(Role.HIDDEN, Layout.EXPERTS, "a stack whose name says nothing")
    stacks = {name: p.shape for name, p in module.named_parameters(recurse=False) if p.ndim == 3}
    widths = {
        weight.shape[1]
        for _, child in mixture.named_children()
        if isinstance(weight := getattr(child, "weight", None), nn.Parameter) and weight.ndim == 2
        if weight.shape[0] == stacks[own][0]
    }
    layouts = set()
    for name, (_, first, second) in stacks.items():
        known = _named(name) in (Role.MLP_IN, Role.MLP_OUT) and len(widths) == 1
        if known and (first in widths) is not (second in widths):
            layouts.add((first in widths) is (_named(name) is Role.MLP_OUT))
    if len(layouts) != 1:
        return Guess(role, Layout.EXPERTS, "(experts, out, in), or EXPERTS_TRANSPOSED?")
    return Guess(role, Layout.EXPERTS if layouts.pop() else Layout.EXPERTS_TRANSPOSED)


def _guess(path: str, own: str, module: nn.Module, parameter: torch.Tensor, before: bool) -> Guess:
    """The role of one tensor from the module that owns it, `before` the blocks or not."""
    if "norm" in type(module).__name__.lower() and (own in ("weight", "bias") or _long(parameter)):
        return norm_guess(own, module)
    if own == "bias":
        weight = getattr(module, "weight", None)
        unknown = Guess(Role.HIDDEN, None, "no weight")
        of = unknown if weight is None else _weight(path, module, weight, before)
        doubt = of.doubt and "the layer's role is uncertain"
        if of.role is Role.ROUTER:
            return Guess(Role.READOUT_BIAS, None, doubt or "a router's bias")
        role = Role.READOUT_BIAS if of.role is Role.READOUT else Role.HIDDEN_BIAS
        return Guess(role, None, doubt)
    if own == "weight":
        return _weight(path, module, parameter, before)
    return _bare(path, own, module, parameter)


def _long(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 1 and parameter.numel() > 1


def norm_guess(own: str, module: nn.Module) -> Guess:
    """A norm's scale, what is added to 1 in its place, or its shift: told apart by what the layer
    does as the tensor goes from 0 to 1."""
    import torch

    if own == "bias":
        return Guess(Role.NORM_BIAS)
    weight = module.get_parameter(own)
    size = weight.shape[0] if weight.ndim == 1 else 1
    given = {name: torch.zeros(p.shape, device="cpu") for name, p in module.named_parameters()}
    # Of buffers a copy, which a batch norm in training counts and averages in.
    given |= {
        name: torch.zeros_like(b, device="cpu") if b.is_meta else b.to("cpu", copy=True)
        for name, b in module.named_buffers()
    }
    for shape in ((64, size), (64, size, 2, 2)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu")
        try:
            with torch.no_grad():
                at_0 = torch.func.functional_call(module, given, (x,))
                at_1 = torch.func.functional_call(
                    module, {**given, own: torch.ones(weight.shape, device="cpu")}, (x,)
                )
            moved = at_1 - at_0
            rms = moved.square().mean().sqrt().item()
        except Exception:  # a norm of other inputs: nothing is known of it
            continue
        if 0.8 < rms < 1.2:
            varies = moved.std(0).mean().item() > 0.1
            plain = at_0.square().mean().sqrt().item() < 0.2
            return Guess(Role.NORM_SCALE if varies and plain else Role.NORM_BIAS)
    return Guess(Role.NORM_SCALE, None, "is it the scale of a norm that starts at 1?")


def _weight(path: str, module: nn.Module, weight: torch.Tensor, before: bool) -> Guess:
    """A layer's `weight`."""
    from torch import nn

    if isinstance(module, nn.Embedding):
        return _table(path)
    if weight.ndim < 2:
        return Guess(Role.NORM_SCALE, None, "a vector called weight")
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        guess = _convolution(path, module)
    else:
        transposed = type(module).__name__ == "Conv1D"  # Hugging Face's
        fan_out, fan_in = reversed(weight.shape) if transposed else weight.shape[:2]
        role, doubt = _matrix(path, fan_in, fan_out, before)
        if not (transposed or role is Role.ROUTER or isinstance(module, nn.Linear)):
            doubt = doubt or f"is a {type(module).__name__} stored as (out, in)?"
        guess = Guess(role, Layout.TRANSPOSED if transposed else None, doubt)
    if guess.doubt or re.search(r"(^|\.)\d+\.", path):  # within a numbered block a name will do
        return guess
    return replace(guess, doubt=_OUTSIDE.get(guess.role, ""))


def _table(path: str) -> Guess:
    name = path.lower().rpartition(".")[2]
    if "relative" in name:
        return Guess(Role.RELATIVE_POSITION)
    if any(word in name for word in _ADDED):
        return Guess(Role.POSITION_EMBEDDING)
    certain = any(word in name for word in _TOKENS)
    return Guess(Role.TOKEN_EMBEDDING, None, "" if certain else "tokens or positions?")


def _convolution(path: str, module: nn.modules.conv._ConvNd) -> Guess:
    if module.groups > 1:
        certain = module.groups == module.in_channels == module.out_channels
        return Guess(Role.DEPTHWISE, None, "" if certain else "a convolution of groups")
    if module.kernel_size in ((1,), (1, 1)) and (role := _named(path)):
        return Guess(role)
    if module.in_channels <= 4:
        return Guess(Role.PATCH_EMBEDDING)
    return Guess(Role.HIDDEN, None, _OUTSIDE[Role.MLP_IN])


def _named(path: str) -> Role | None:
    """The role that a name gives by itself."""
    for role, words in _NAMES:
        if re.search(rf"(^|\.)({words})$", path, re.I):
            return role
    return None


def _matrix(path: str, fan_in: int, fan_out: int, before: bool) -> tuple[Role, str]:
    """The role of a matrix, and a doubt."""
    role = _named(path)
    if role is Role.QKV and fan_out % fan_in:
        return role, "other than three parts of one size"
    if role is not None:
        pooled = "pool" in path and role in (Role.QUERY, Role.KEY, Role.VALUE)
        return role, "attends outside the blocks" if pooled else ""
    if re.search(rf"(^|\.)({_BLOCK_END})$", path):
        if re.search(r"att(ention|n)[^.]*\.", path, re.I):
            return Role.ATTENTION_OUTPUT, ""
        if re.search(r"(mlp|ffn|feed_?forward|relu)[^.]*\.", path, re.I):
            return Role.MLP_OUT, ""
        if re.search(r"\d\.output\.dense$", path) and fan_in > fan_out:
            return Role.MLP_OUT, ""
    if path.rpartition(".")[2] == "decoder" and fan_out > fan_in:
        return Role.READOUT, ""
    if not re.search(r"\.\d+\.", path) and fan_in != fan_out:
        called = re.search(r"(^|[._])(in|inputs?|embed\w*|stem)([._]|$)", path)
        if before or (called and fan_out > fan_in):
            return Role.PATCH_EMBEDDING, "outside the blocks: the first layer, not the readout?"
        return Role.READOUT, "a matrix outside the blocks: the readout, not the first layer?"
    if fan_in == fan_out:
        return Role.HIDDEN, "a square matrix whose name says nothing"
    wide = fan_out > fan_in
    return (Role.MLP_IN if wide else Role.MLP_OUT), "judged by its shape alone"


def _bare(path: str, own: str, module: nn.Module, parameter: torch.Tensor) -> Guess:
    """A tensor that stands in a module under a name of its own."""
    from torch import nn

    name = own.lower()
    if "relative" in name:
        return Guess(Role.RELATIVE_POSITION)
    if any(word in name for word in _ADDED) and parameter.ndim >= 2:
        return Guess(Role.POSITION_EMBEDDING)
    if "lora_embedding" in path:
        return Guess(Role.HIDDEN, None, "an embedding's LoRA factor, for which there is no role")
    if parameter.ndim == 1:
        if name.startswith("gamma"):
            return Guess(Role.LAYER_SCALE)
        if _long(parameter) and not parameter.is_meta and bool((parameter == 1).all()):
            return Guess(Role.NORM_SCALE, None, "a vector of ones: the scale of a norm?")
        certain = name.endswith("_bias")
        return Guess(Role.HIDDEN_BIAS, None, "" if certain else "a vector whose name says nothing")
    if name.endswith("_bias") and "expert" in path:
        return Guess(Role.HIDDEN_BIAS)
    if (role := _named(own)) and parameter.ndim == 2:
        if role in (Role.LORA_A, Role.LORA_B):
            small = 0 if role is Role.LORA_A else 1
            certain = parameter.shape[small] < parameter.shape[1 - small]
            return Guess(role, None, "" if certain else "which axis is the rank?")
        known = isinstance(module, nn.MultiheadAttention)
        return Guess(role, None, "" if known else "is it stored as (out, in)?")
    if parameter.ndim > 1 and parameter.shape[:-1].numel() == 1:
        return Guess(Role.POSITION_EMBEDDING, None, "a token of its own, such as a class token?")
    if parameter.ndim > 2:
        return Guess(Role.HIDDEN, Layout.EXPERTS, "a stack of matrices (out, in), or a kernel?")
    return Guess(Role.HIDDEN, None, "a tensor whose name says nothing")


# From tensors to patterns

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


def _as_rules(guesses: dict[str, Guess]) -> Suggestion:
    """The shortest patterns of block numbers that name no tensor of another role."""
    rules: list[Rule] = []
    doubts: dict[str, str] = {}
    # A * may match more than a number: any name that ends like this one after its last number.
    # So each pattern is compared with the names of that ending only.
    endings: dict[str, list[str]] = {}
    for name in guesses:
        endings.setdefault(_NUMBER.split(name)[-1], []).append(name)
    covered: set[str] = set()
    for name, guess in guesses.items():
        if name in covered:
            continue
        last = _NUMBER.split(name)[-1]
        alike = [name]
        if last != name:
            alike = [n for ending, names in endings.items() if ending.endswith(last) for n in names]
        for pattern in _patterns(name):
            rule = Rule(pattern, guess.role, guess.layout)
            names = [other for other in alike if rule.matches(other)]
            if all(_read_alike(guesses[other], guess) for other in names):
                break
        covered.update(names)
        rules.append(rule)
        if doubt := next((guesses[other].doubt for other in names if guesses[other].doubt), ""):
            doubts[rule.pattern] = doubt
    return Suggestion(tuple(rules), doubts)


def _patterns(name: str) -> Iterable[str]:
    """Patterns: all numbers as *, then one number less at a time, then the name (escaped)."""
    parts = [re.sub(r"([*?[])", r"[\1]", part) for part in _NUMBER.split(name)]
    numbers = _NUMBER.findall(name)
    for count in range(len(numbers), -1, -1):
        middle = ["*"] * count + numbers[count:]
        yield "".join(map("".join, zip(parts, [*middle, ""], strict=True)))


def _read_alike(one: Guess, other: Guess) -> bool:
    layouts = (guess.layout or guess.role.facts.layout for guess in (one, other))
    return one.role is other.role and len({*layouts}) == 1
