"""Roles: what a tensor does in a Transformer, and the rules that give every tensor exactly one.

A prescription speaks of roles ("query", "readout"), a model of names ("blocks.0.attn.q.weight").
`assign` joins the two and refuses to guess: a tensor without a rule, a tensor with two, and a
rule without a tensor are errors, because each of them is a silently wrong learning rate.
"""

from __future__ import annotations

import difflib
import fnmatch
import functools
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn


class PlanError(ValueError):
    """A model, a rule or a prescription that cannot give every tensor its numbers.

    One line that names the tensor or the key, says what was expected and what to do.

    >>> Rule("*", "querry")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    param_groups.roles.PlanError: unknown role 'querry'; did you mean 'query'? valid: ...
    """


def nearest(value: object, names: Sequence[str]) -> str:
    """The name that is spelled most like a value."""
    return difflib.get_close_matches(str(value), names, n=1, cutoff=0.0)[0]


def choose(kind: str, value: object, valid: Iterable[str]) -> str:
    """`value` if it is one of `valid`, else PlanError that names the nearest of them."""
    names = [str(name) for name in valid]
    if isinstance(value, str) and value in names:
        return value
    raise PlanError(
        f"unknown {kind} {value!r}; did you mean {nearest(value, names)!r}? valid: "
        f"{', '.join(names)}"
    )


class Layout(StrEnum):
    """How a tensor's axes map to fan-in and fan-out.

    >>> fans("attn.weight", (768, 2304), Layout.TRANSPOSED)
    (768, 2304)
    """

    LINEAR = "linear"  # (out, in, *kernel), as nn.Linear and nn.Conv2d
    TRANSPOSED = "transposed"  # (in, out, *kernel), as GPT-2's Conv1D and nn.ConvTranspose2d
    TABLE = "table"  # (..., width): one row is looked up or added, so fan_in is 1
    VECTOR = "vector"  # (width,) or (): elementwise, so fan_in is 1
    EXPERTS = "experts"  # (experts, out, in), or a stack of layers; more axes may lead
    EXPERTS_TRANSPOSED = "experts_transposed"  # (experts, in, out)
    OUTS_IN = "outs_in"  # (heads, size, in): all axes but the last are outputs
    IN_OUTS = "in_outs"  # (in, heads, size), as flax has them; (out, heads, size) is LINEAR
    INS_OUT = "ins_out"  # (heads, size, out)


IN, OUT = "fan_in", "fan_out"


class Facts(NamedTuple):
    """What is true of a role in every model; prescriptions and checks read nothing else of it.

    Args:
        kind: the layer type of Everett et al., App. C.1, "embedding", "hidden" or "readout"; what
            is added to logits is "logits". Whatever sums over a constant number of inputs goes
            with embeddings (Yang et al. 2022, Table 8: "input weights and all biases").
        grows: the fans that grow with the width.
        layout: the axes, unless a rule says otherwise.
        axis: the fan that must be the model's width, if any must.
        branch: whether a residual branch holds it, unless its place says otherwise.
        block: whether it is a matrix that every block has, by which blocks are known.
        start: "normal" values, "one" or "zero".
        spread: what the variance of normal values is over: the "width", the "fan_in" or nothing.
        gradient: whether the power of its gradient is known.
        norm: whether it acts in a norm, where all entries are one number until they are trained.
        shared: whether several heads or channels may share it, whose gradients then add up.
        parts: the roles that a fused matrix holds, by name.
    """

    kind: str
    grows: tuple[str, ...] = (OUT,)
    layout: Layout = Layout.LINEAR
    axis: str | None = None
    branch: bool = True
    block: bool = False
    start: str = "normal"
    spread: str = "width"
    gradient: bool = True
    norm: bool = False
    shared: bool = False
    parts: tuple[str, ...] = ()


def _matrix(axis: str, **more: Any) -> Facts:
    """A matrix of a block, between two axes that grow."""
    return Facts("hidden", (IN, OUT), axis=axis, block=True, **more)


def _table(**more: Any) -> Facts:
    """Rows that are looked up outside of all branches."""
    return Facts("embedding", layout=Layout.TABLE, axis=OUT, branch=False, spread="none", **more)


def _vector(start: str, **more: Any) -> Facts:
    """A scale, which starts at one, or a bias, which starts at zero."""
    return Facts(more.pop("kind", "embedding"), layout=Layout.VECTOR, start=start, **more)


class Role(StrEnum):
    """What a tensor does; the vocabulary that rules and prescriptions share, a row per role.

    Source: the union of the tensors in the models of the four papers, and of stock models.

    >>> Role("query") is Role.QUERY, Role.QUERY.facts.kind
    (True, 'hidden')
    """

    facts: Facts

    def __new__(cls, name: str, facts: Facts | None = None) -> Role:
        if facts is None:
            raise TypeError(f"a row without facts: {name}")
        role = str.__new__(cls, name)
        role._value_, role.facts = name, facts
        return role

    TOKEN_EMBEDDING = "token_embedding", _table()
    POSITION_EMBEDDING = "position_embedding", _table()
    PATCH_EMBEDDING = "patch_embedding", Facts("embedding", axis=OUT, branch=False, spread="fan_in")
    NORM_SCALE = "norm_scale", _vector("one", norm=True, shared=True)
    # After the last block; told apart by rules for the depth alone.
    FINAL_NORM_SCALE = "final_norm_scale", _vector("one", norm=True, branch=False)
    NORM_BIAS = "norm_bias", _vector("zero", norm=True, shared=True)
    QUERY = "query", _matrix(IN)
    KEY = "key", _matrix(IN, shared=True)
    VALUE = "value", _matrix(IN, shared=True)
    # One matrix holding query, key and value, as in timm and GPT-2.
    QKV = "qkv", _matrix(IN, shared=True, parts=("query", "key", "value"))
    # One matrix holding key and value, as in CaiT.
    KEY_VALUE = "key_value", _matrix(IN, shared=True, parts=("key", "value"))
    ATTENTION_OUTPUT = "attention_output", _matrix(OUT)
    MLP_IN = "mlp_in", _matrix(IN)
    MLP_OUT = "mlp_out", _matrix(OUT)
    HIDDEN_BIAS = "hidden_bias", _vector("zero", shared=True)
    READOUT = "readout", Facts("readout", (IN,), axis=IN, branch=False)
    READOUT_BIAS = "readout_bias", _vector("zero", kind="logits", branch=False, grows=())
    # Any other matrix between two axes of the model's width.
    HIDDEN = "hidden", Facts("hidden", (IN, OUT))
    # One small kernel per channel, as in ConvNeXt.
    DEPTHWISE = "depthwise", Facts("embedding", spread="fan_in")
    # A gain on a residual branch, of each channel or of several at once.
    LAYER_SCALE = "layer_scale", _vector("one", shared=True)
    # Numbers added to attention logits, as in T5 and Swin.
    RELATIVE_POSITION = (
        "relative_position",
        Facts("logits", layout=Layout.TABLE, start="zero", gradient=False),
    )
    # The matrix that chooses among experts: its outputs are as few at every width.
    ROUTER = "router", Facts("readout", (IN,), gradient=False)
    # (r, n) for an r that does not grow, and no readout: latents, gates, adapters.
    NARROWING = "narrowing", Facts("hidden", (IN,), gradient=False)
    # (n, r), back again; and whatever else sums over what does not grow.
    WIDENING = "widening", Facts("embedding", spread="fan_in", gradient=False)
    # (rank, n) starts at random, (n, rank) at zero.
    LORA_A = "lora_a", Facts("hidden", (IN,), gradient=False)
    LORA_B = "lora_b", Facts("embedding", start="zero", gradient=False)

    @property
    def parts(self) -> tuple[Role, ...]:
        """The roles that a fused matrix holds; of any other the role itself."""
        return tuple(Role(name) for name in self.facts.parts) or (self,)


UNTIE = (
    "; to train from scratch, put Tied(...) around the rule, or give the readout a Parameter of "
    "its own (Hugging Face's tie_word_embeddings=False, but for T5, whose config keeps the tie); a "
    "checkpoint would lose its head by that: take one rate for all tensors, Everett('standard', n, "
    "n, alignment='global')"
)


class Measured(NamedTuple):
    """A factor of the forward pass as a trace measured it, for `plan` to compare.

    `factor` is "attention_scale" (on the products of the queries that a rule names), "embed_scale",
    "residual_multiplier" or "logit_multiplier"; `value` is None where it could not be read.
    `grows` says that the head dimension is another at another width; a factor on logits that grows
    has the width there.
    """

    factor: str
    value: float | None
    head_dim: int | None = None
    grows: bool = False


@dataclass(frozen=True)
class Rule:
    """Gives the tensors whose full name matches a shell pattern (`*`, `?`, `#`) one role.

    Args:
        pattern: of the whole name, as `named_parameters` has it; # stands for a number, * for any
            text, dots included.
        role: a `Role` or its name.
        layout: how to read the axes; by default embeddings are tables, scales and biases are
            vectors and everything else is a linear or convolution weight.
        scale: multiplies the initial values (1e-6 for a LayerScale, 0 for a closed branch).
        trunk: True for tensors outside of all residual branches, False for those inside, where a
            rule for the depth cannot know.
        keep: the model's own initial values stay: `initialise` draws none (a Mamba's dt_bias).
        measured: factors of the forward pass that go with these tensors, as `traced` writes them.
        parts: of a tensor that holds several matrices, their sizes along the outputs or the ratios
            of these: (n, n, n), (4, 1, 1) for grouped keys, (1, 1) for gate and up, (1,) * 36 head
            by head. By default a qkv with three times as many outputs as inputs has three, and all
            else but groups of a convolution one. () says that no cut separates them (keys between
            queries, head by head).

    Raises:
        PlanError: a name that is neither role nor layout, a scale that is negative or not finite,
            parts that are no positive integers.

    >>> Rule("blocks.*.attn.q.weight", "query").matches("blocks.11.attn.q.weight")
    True
    """

    pattern: str
    role: Role
    layout: Layout | None = None
    scale: float = 1.0
    trunk: bool | None = None
    keep: bool = False
    measured: tuple[Measured, ...] = ()
    parts: tuple[int, ...] | None = None

    if TYPE_CHECKING:  # the fields hold members; names are taken, too

        def __init__(
            self,
            pattern: str,
            role: Role | str,
            layout: Layout | str | None = None,
            scale: float = 1.0,
            trunk: bool | None = None,
            keep: bool = False,
            measured: tuple[Measured, ...] = (),
            parts: Sequence[int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise PlanError(f"a rule's pattern is a text with * and ?, got {self.pattern!r}")
        object.__setattr__(self, "role", Role(choose("role", self.role, Role)))
        if self.layout is not None:
            object.__setattr__(self, "layout", Layout(choose("layout", self.layout, Layout)))
        number = isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool)
        if not (number and 0 <= self.scale < math.inf):
            raise PlanError(
                f"rule {self.pattern!r}: scale must be finite and not negative, got {self.scale!r}"
            )
        if self.trunk not in (None, True, False):
            raise PlanError(f"rule {self.pattern!r}: trunk is True or False, got {self.trunk!r}")
        if self.parts is not None:
            if not (
                isinstance(self.parts, Sequence)
                and all(type(size) is int and size > 0 for size in self.parts)
            ):
                raise PlanError(
                    f"rule {self.pattern!r}: parts are sizes along the outputs such as (64, 64, "
                    f"64), got {self.parts!r}"
                )
            object.__setattr__(self, "parts", tuple(self.parts))

    def matches(self, name: str) -> bool:
        """Whether the whole of a parameter's name matches the pattern."""
        return self.pattern == name or _expression(self.pattern).match(name) is not None


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(fnmatch.translate(pattern.replace("#", "\0")).replace("\0", "[0-9]+"))


@dataclass(frozen=True)
class Assignment:
    """One tensor with its role; `tied_to` lists its other names in the model."""

    name: str
    parameter: nn.Parameter
    role: Role
    layout: Layout
    tied_to: tuple[str, ...]
    scale: float = 1.0
    trunk: bool | None = None
    keep: bool = False
    measured: tuple[Measured, ...] = ()
    parts: tuple[int, ...] | None = None

    @property
    def fans(self) -> tuple[int, int]:
        """(fan_in, fan_out) under the layout."""
        return fans(self.name, tuple(self.parameter.shape), self.layout)


Fans = Mapping[str, tuple[int, int]]


def fans(name: str, shape: Sequence[int], layout: Layout) -> tuple[int, int]:
    """(fan_in, fan_out): inputs summed into one output, and outputs.

    A convolution's fan_in counts its kernel; a lookup sums one row, so its fan_in is 1. Position
    tables may carry leading axes of size one, (1, T, n). A transposed convolution's fan_in is its
    input channels, which is right where its stride is its kernel; where windows overlap, a rule's
    `scale` of stride / kernel (in two dimensions) makes up for it. PlanError for too few axes."""
    if layout is Layout.VECTOR:
        return 1, shape[-1] if shape else 1
    if len(shape) < 2:
        raise PlanError(f"{name!r} has shape {tuple(shape)}, which has too few axes for {layout}")
    if layout is Layout.TABLE:
        return 1, shape[-1]
    if layout is Layout.TRANSPOSED:
        return shape[0], shape[1]
    if layout in (Layout.EXPERTS, Layout.EXPERTS_TRANSPOSED):
        if len(shape) < 3:
            raise PlanError(f"{name!r} has shape {tuple(shape)}, but {layout} needs three axes")
        return (shape[-1], shape[-2]) if layout is Layout.EXPERTS else (shape[-2], shape[-1])
    first, last = (shape[0], math.prod(shape[1:])), (math.prod(shape[:-1]), shape[-1])
    several = {Layout.IN_OUTS: first, Layout.INS_OUT: last, Layout.OUTS_IN: last[::-1]}
    return several.get(layout, first[::-1])


def present(catalogue: Iterable[Rule], model: nn.Module) -> list[Rule]:
    """The rules of a catalogue that match something in this model.

    For libraries whose options drop tensors (biases, class token). A tensor that no rule names is
    still an error in `assign`; only the opposite check is given up.

    Args:
        catalogue: rules for all that the library may build.
        model: it is only read.

    Returns:
        The rules that name a tensor, in their order.

    >>> from torch import nn
    >>> both = [Rule("0.weight", "readout"), Rule("0.bias", "readout_bias")]
    >>> len(present(both, nn.Sequential(nn.Linear(4, 2, bias=False))))
    1
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return [rule for rule in catalogue if any(map(rule.matches, names))]


def assign(model: nn.Module, rules: Sequence[Rule]) -> list[Assignment]:
    """Joins names and roles; refuses to guess.

    Args:
        model: unwrapped and uncompiled; it is only read.
        rules: together they name every tensor, and no two give one tensor different roles.

    Returns:
        One assignment per tensor, in the model's order; tied tensors once, recognised by identity.

    Raises:
        PlanError: a wrapped or compiled model, a tensor that no rule names or that two rules give
            different roles, a rule that matches nothing, and axes that may mean two things.

    >>> from torch import nn
    >>> one, = assign(nn.Sequential(nn.Linear(4, 2, bias=False)), [Rule("0.weight", "readout")])
    >>> str(one.role), one.fans
    ('readout', (4, 2))
    """
    from torch.nn.modules.conv import _ConvNd

    check_model(model)
    if not isinstance(rules, Sequence) or not all(isinstance(rule, Rule) for rule in rules):
        got = f"got {reprlib.repr(rules)}"
        if isinstance(getattr(rules, "rules", None), Sequence):
            got = "pass the `.rules` of what was given"
        raise PlanError(f"rules are a list of Rule(pattern, role), {got}")
    tensors: dict[nn.Parameter, list[str]] = {}  # with all their names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensors.setdefault(parameter, []).append(name)
    if not tensors:
        raise PlanError("the model has no parameters")
    owner = {name: parameter for parameter, names in tensors.items() for name in names}
    every = [*owner]
    matching: dict[nn.Parameter, list[Rule]] = {parameter: [] for parameter in tensors}
    for rule in rules:
        # A pattern without wildcards is looked up: models of thousands of names take no square.
        plain = not any(wild in rule.pattern for wild in "*?[#")
        hits = [n for n in ([rule.pattern] if plain else every) if n in owner and rule.matches(n)]
        for parameter in dict.fromkeys(owner[name] for name in hits):
            matching[parameter].append(rule)
        if not hits:
            raise PlanError(
                f"rule {rule.pattern!r} -> {rule.role} matches no tensor; the nearest name is "
                f"{nearest(rule.pattern, every)!r}"
            )
    unnamed = [f"{names[0]!r} {tuple(p.shape)}" for p, names in tensors.items() if not matching[p]]
    if unnamed:
        more = f" and {len(unnamed) - 3} more" if len(unnamed) > 3 else ""
        shown = ", ".join(unnamed[:3])
        raise PlanError(f"no rule names {shown}{more}; add Rule(pattern, role) for it")
    assignments = []
    for parameter, (first, *tied) in tensors.items():
        rule = _only_rule(matching[parameter], (first, *tied))
        layout = rule.layout or rule.role.facts.layout
        long = sum(size > 1 for size in parameter.shape)
        if rule.layout is None and layout is Layout.VECTOR and long > 1:
            raise PlanError(
                f"{first!r} has shape {tuple(parameter.shape)}, and a {rule.role} is a vector: "
                "give it the role of a matrix, or Layout.VECTOR if it holds several vectors"
            )
        if rule.layout is None and layout is Layout.LINEAR and parameter.ndim > 2:
            layer = model.get_submodule(first.rpartition(".")[0])
            if not isinstance(layer, _ConvNd):
                raise PlanError(
                    f"{first!r} has shape {tuple(parameter.shape)}, and {type(layer).__name__} is "
                    "no convolution of torch: give its rule Layout.EXPERTS if it is a stack of "
                    "(out, in) matrices, one per layer or expert, Layout.LINEAR if it is a kernel"
                )
        own = (rule.role, layout, tuple(tied), rule.scale, rule.trunk, rule.keep, rule.measured)
        assignments.append(Assignment(first, parameter, *own, rule.parts))
    return assignments


def fans_of(model: nn.Module, rules: Sequence[Rule]) -> Fans:
    """The fans of every tensor: a base for `plan(base=...)` that can be kept as JSON.

    Args:
        model: the model at its base size, on any device or "meta".
        rules: as in `assign`.

    Returns:
        {name: (fan_in, fan_out)}, inputs and outputs of one unit.

    Raises:
        PlanError: as `assign`.

    >>> from torch import nn
    >>> fans_of(nn.Sequential(nn.Linear(4, 2, bias=False)), [Rule("0.weight", "readout")])
    {'0.weight': (4, 2)}
    """
    return {assignment.name: assignment.fans for assignment in assign(model, rules)}


# By class name, so that neither torch.compile nor another library is imported to look.
_WRAPPERS = {
    "DistributedDataParallel": "a DDP wrapper",
    "DataParallel": "a DataParallel wrapper",
    "FullyShardedDataParallel": "an FSDP version 1 wrapper (fully_shard, version 2, is fine)",
    "OptimizedModule": "torch.compile",
    "ScriptModule": "TorchScript",
    "DeepSpeedEngine": "DeepSpeed's engine",
}


def check_model(model: nn.Module) -> None:
    """Raises PlanError for what is no model, and for one inside a wrapper that renames tensors."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise PlanError(f"a model is an nn.Module, got {type(model).__name__}")
    for kind in type(model).__mro__:
        if wrapper := _WRAPPERS.get(kind.__name__):
            raise PlanError(
                f"the model is inside {wrapper}; plan the unwrapped, uncompiled model before "
                "wrapping it"
            )


def _only_rule(matching: Sequence[Rule], names: Sequence[str]) -> Rule:
    claimed = {
        replace(rule, pattern="", layout=rule.layout or rule.role.facts.layout, measured=())
        for rule in matching
    }
    if len(claimed) == 1:
        return matching[0]
    tied = f" (tied to {', '.join(names[1:])}; name it once)" if names[1:] else ""
    scales = len({rule.scale for rule in matching}) > 1
    claims = " and ".join(
        f"{rule.pattern!r} -> {rule.role}" + (f" with scale {rule.scale:g}" if scales else "")
        for rule in matching
    )
    hint = UNTIE if {one.role for one in claimed} == {Role.TOKEN_EMBEDDING, Role.READOUT} else ""
    raise PlanError(f"tensor {names[0]!r}{tied} is named by two rules: {claims}{hint}")
