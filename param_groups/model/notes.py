"""What a trace notes of a model: where each parameter goes, and what every activation carries."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from param_groups.model import calls
from param_groups.model.attention import Attention, Flow

NOTHING: frozenset[str] = frozenset()
Axes = tuple[Sequence[int], Sequence[int]]  # summed over, and made


@dataclass(frozen=True)
class Use:
    """One call that takes a parameter, maybe through views.

    Args:
        op: the function, or what it does ("bias", "norm_scale", "scale", "added", "joined").
        path: functions and indices between the parameter and the call.
        shape: of the view; `summed` and `made` are its axes, as in `calls.Operand`.
        own: of each axis of the view the parameter's, None where several were merged.
        marks: of the activations beside it; "of NAME" is the matrix whose bias it is.
        acts_as: the number as which a constant tensor acts after functions of it.
        at: the index of the result, of a product or a lookup.
    """

    op: str
    path: str
    shape: tuple[int, ...]
    summed: tuple[int, ...]
    made: tuple[int, ...]
    own: tuple[int | None, ...]
    marks: frozenset[str]
    acts_as: float | None
    at: int


class Notes:
    """The notes of one pass; `starts` are the fresh values of the parameters."""

    def __init__(self, model: nn.Module, starts: Mapping[str, Tensor]) -> None:
        self.parameters, self.starts = dict(model.named_parameters()), starts
        same = {n: bool((t == t.flatten()[0]).all()) for n, t in starts.items() if t.numel()}
        self.constant = {name for name, constant in same.items() if constant}
        owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        self.tied = {name for name, p in self.parameters.items() if owners[id(p)] > 1}
        self.bits = {name: 1 << i for i, name in enumerate(self.parameters)}
        # Parameters and what is made of them alone: by id, their names and the path to it.
        self.views = {id(p): (frozenset({n}), "") for n, p in self.parameters.items()}
        self.flows: dict[int, Flow] = {}
        self.alive: list[Tensor] = []  # so that no id is given twice
        self.results: list[tuple[Tensor, int]] = []
        self.uses: dict[str, list[Use]] = defaultdict(list)
        self.fed: dict[str, int] = defaultdict(int)  # what each parameter met, as bits
        self.joined = 0  # activations after a residual sum, as bits
        self.attentions: list[Attention] = []
        self.on_scores: dict[int, set[str]] = defaultdict(set)
        self.factors: dict[tuple[str, str], float] = {}
        self.splits: dict[str, tuple[int, ...]] = {}
        self.output: set[str] = set()
        self.chosen: set[str] = set()
        self.tables: set[str] = set()
        self.branch: set[str] = set()  # inside a residual branch
        self.beside: set[str] = set()  # reaches a branch from elsewhere, as an encoder does
        self.closing: set[tuple[str, int]] = set()  # the last products of branches
        self.branches: list[tuple[set[str], set[str]]] = []  # what is in them, what ends them
        self.doubts: list[str] = []

    def names(self, tensor: Tensor | None) -> frozenset[str]:
        """The parameters that a tensor is a view of; none for all else."""
        return self.views.get(id(tensor), (NOTHING, ""))[0]

    def flow(self, tensor: Tensor | None) -> Flow:
        """What an activation carries; nothing for all else."""
        return self.flows.get(id(tensor), Flow())

    def put(self, tensor: Tensor, flow: Flow) -> None:
        """Notes what a new activation carries."""
        self.alive.append(tensor)
        serial = 1 << len(self.alive)
        self.joined |= serial if "stream" in flow.marks else 0
        self.flows[id(tensor)] = replace(flow, above=flow.above | serial, serial=serial)

    def note_factor(self, place: str, flow: Flow, names: Collection[str] = ()) -> None:
        """Notes numbers that an activation was multiplied by, of the parameters that made it."""
        if flow.factor not in (1.0, None):
            self.factors.update({(place, name): flow.factor for name in names or flow.names})

    def use(
        self,
        tensor: Tensor,
        op: str,
        axes: Axes = ((), ()),
        result: Tensor | None = None,
        axis: int = -1,
        marks: Iterable[str] = (),
    ) -> Flow:
        """Notes a use of all parameters in a view; what its result carries."""
        (names, path), at = self.views[id(tensor)], len(self.results)
        summed, made = (tuple(i % tensor.ndim for i in group) for group in axes)
        for name in names:
            whole = self.parameters[name]
            sizes = zip(whole.stride(), whole.shape, strict=True)
            strides = [stride if size > 1 else None for stride, size in sizes]
            own = tuple(
                strides.index(stride) if size > 1 and stride in strides else None
                for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
            )
            acts = float(tensor.detach().mean()) if name in self.constant else None
            shape, beside = tuple(tensor.shape), frozenset(marks)
            self.uses[name].append(Use(op, path, shape, summed, made, own, beside, acts, at))
        if result is None:
            return Flow()
        self.results.append((result, axis))
        return Flow(frozenset((name, at) for name in names))

    def derive(self, call: calls.Call) -> None:
        """What is made of parameters alone is the parameter still; a smaller one in it, as a weight
        norm's g, only scales it; of a product no one of them is the parameter."""
        views = [t for t in call.ins if id(t) in self.views]
        largest = max(t.numel() for t in views)
        for t in views:
            if t.numel() < largest:
                self.use(t, "scale")
        same = [self.views[id(t)] for t in views if t.numel() == largest]
        names = NOTHING.union(*(names for names, _ in same if call.name not in calls.PRODUCTS))
        for i, t in enumerate(call.outs):
            self.alive.append(t)
            path = f"{same[0][1]} {calls.step(call, i)}".strip()
            self.views[id(t)] = names, path

    def join_stream(self, stream: Flow, other: Flow) -> bool:
        """Notes a residual branch, if `other` was made from the stream that it is added to.

        The branch holds what met something that was made from the stream; what else is in `other`
        comes from beside it, as what a decoder's keys read of an encoder.
        """
        new = other.past & ~stream.past
        if not stream.serial & other.above or not new:
            return False
        inside = {name for name, bit in self.bits.items() if new & bit}
        below = {name for name in inside if self.fed[name] & stream.serial}
        ends = other.made - stream.made
        self.branch |= below
        self.beside |= inside - below
        self.closing |= ends
        self.branches.append((below, {name for name, _ in ends}))
        self.note_factor("embedding" if stream.names <= self.tables else "stream", stream)
        if len(other.names) == 1:
            self.note_factor("branch", other)
        return True
