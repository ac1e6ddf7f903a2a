"""Mistakes planted in right plans: kind of tensor x number x power x size x optimiser.

Nothing here knows the check or the audit. A `Subject` is a rule on a small model at several sizes.
A `Case` is one of its right plans (power 0), or one with a number of one kind of tensor multiplied
by a power of the size, or by a constant at one size alone. `cases(seed, ...)` draws them.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from param_groups import (
    Bordelon,
    CompleteP,
    Decay,
    Dinan,
    EpsFollows,
    Everett,
    Forward,
    Muon,
    Plan,
    Prescription,
    Role,
    Rule,
    Tuned,
    plan,
)
from tests.param_groups.wrapped import ruled

# A kind of tensor and its roles.
KINDS = {
    "embedding": (Role.TOKEN_EMBEDDING, Role.POSITION_EMBEDDING, Role.PATCH_EMBEDDING),
    "query": (Role.QUERY, Role.KEY),
    "hidden": (Role.VALUE, Role.ATTENTION_OUTPUT, Role.MLP_IN, Role.MLP_OUT, Role.HIDDEN),
    "readout": (Role.READOUT,),
    "vector": (Role.NORM_SCALE, Role.FINAL_NORM_SCALE, Role.HIDDEN_BIAS),
    "bias": (Role.READOUT_BIAS,),
    "router": (Role.ROUTER,),
}
NUMBERS = ("start", "rate", "eps", "decay")
POWERS = (-1.0, -0.5, 0.5, 1.0)
SAMPLES = 4
NO_EPS = ("sgd", "adam_atan2", "muon")


def plant(made: Plan, kind: str, number: str, power: float, ratio: float) -> Plan:
    """The plan with a number of all tensors of a kind (or of the tensor of that name) times
    ratio^power. A rate leaves the decay per step alone."""
    factor, rows = ratio**power, []
    for row in made.rows:
        if kind == row.name or row.role in KINDS.get(kind, ()):
            rows.append(dataclasses.replace(row, **_changed(row, number, factor)))
        else:
            rows.append(row)
    return dataclasses.replace(made, rows=tuple(rows))


def _changed(row, number: str, factor: float) -> dict[str, float]:
    if number == "start":
        return {"init_mean": row.init_mean * factor, "init_std": row.init_std * factor}
    if number == "rate":
        return {"lr": row.lr * factor, "weight_decay": row.weight_decay / factor}
    key = {"eps": "eps", "decay": "weight_decay"}[number]
    return {key: getattr(row, key) * factor}


def acts(made: Plan, kind: str, number: str) -> bool:
    """Whether the number says anything in a tensor of this kind: it is not zero, and the tensor's
    optimiser has an epsilon."""
    for row in made.rows:
        if row.role in KINDS[kind]:
            if number == "eps" and (row.optimizer in NO_EPS or row.eps == 0):
                continue
            key = {"rate": "lr", "eps": "eps", "decay": "weight_decay"}.get(number)
            if getattr(row, key) if key else row.init_mean or row.init_std:
                return True
    return False


class Block(nn.Module):
    """Attention, then an MLP or experts that a router weighs; each a branch of the stream."""

    def __init__(self, width, vectors, experts):
        super().__init__()
        linear = functools.partial(nn.Linear, width, bias=False)
        self.query, self.key, self.value, self.output = (linear(width) for _ in range(4))
        self.up = nn.Linear(width, 2 * width, bias=vectors)
        self.down = nn.Linear(2 * width, width, bias=vectors)
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, bias=False, elementwise_affine=vectors) for _ in range(2)
        )
        if experts:
            self.up = self.down = None
            self.router = linear(3)
            self.experts = nn.ModuleList(linear(width) for _ in range(3))

    def forward(self, x, head_dim, scale, residual):
        split = lambda t: t.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        h = self.norms[0](x)
        q, k, v = (split(part(h)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=True)
        x = x + residual * self.output(mixed.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        if self.up is not None:
            return x + residual * self.down(F.relu(self.up(h)))
        share = self.router(h).softmax(-1)
        return x + residual * sum(share[..., i, None] * e(h) for i, e in enumerate(self.experts))


class Tiny(nn.Module):
    """A decoder of a few thousand parameters."""

    TOKENS, PLACES = 23, 6

    def __init__(self, width, depth, head_dim=8, *, vectors=True, experts=False, patches=False):
        super().__init__()
        self.first = nn.Linear(5, width, bias=False) if patches else nn.Embedding(23, width)
        self.places = nn.Embedding(self.PLACES, width)
        self.blocks = nn.ModuleList(Block(width, vectors, experts) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False, elementwise_affine=vectors)
        self.readout = nn.Linear(width, self.TOKENS)
        self.head_dim, self.scale, self.residual = head_dim, head_dim**-0.5, 1.0

    def forward(self, x):
        x = self.first(x) + self.places.weight
        for block in self.blocks:
            x = block(x, self.head_dim, self.scale, self.residual)
        return self.readout(self.norm(x))


RULES = ruled("""
places.weight position_embedding, *.query.weight query, *.key.weight key, *.value.weight value,
*.output.weight attention_output, *.up.weight mlp_in, *.down.weight mlp_out, *.router.weight router,
*.experts.*.weight hidden, *.norms.*.weight norm_scale, norm.weight final_norm_scale,
blocks.*.bias hidden_bias, readout.weight readout, readout.bias readout_bias""")


def batch(model: Tiny, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, of random tokens or of noise."""
    draw = torch.Generator().manual_seed(seed)
    targets = torch.randint(model.TOKENS, (SAMPLES, model.PLACES), generator=draw)
    if isinstance(model.first, nn.Linear):
        return torch.randn(SAMPLES, model.PLACES, 5, generator=draw), targets
    return torch.randint(model.TOKENS, (SAMPLES, model.PLACES), generator=draw), targets


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


@dataclasses.dataclass(frozen=True)
class Mine(Prescription):
    """muP's numbers under a name of no paper."""

    width: float
    optimizer: str = "adam"

    def __call__(self, tensor):
        return Everett("mup", self.width, 32, self.optimizer)(tensor)

    def forward(self, size=None):
        return Forward(attention=-1.0)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A rule on the model at several sizes; `make(size)` is the prescription there."""

    label: str
    make: Callable[[int], Prescription]
    size: str = "width"
    sizes: tuple[int, ...] = (32, 64, 128)
    lr: float = 2**-8
    model: tuple[tuple[str, bool], ...] = ()
    decay: tuple[float, str | None] = (0.0, None)
    absorb: bool = True

    def build(self, size: int) -> tuple[Tiny, Plan]:
        """The model at a size and its right plan."""
        rule = self.make(size)
        width = 32 if self.size == "depth" else int(rule.width)
        head_dim = size if self.size == "head_dim" else 8
        options = dict(self.model)
        model = Tiny(width, size if self.size == "depth" else 2, head_dim, **options)
        forward = rule.forward()
        model.scale = forward.attention_scale(head_dim)
        model.residual = forward.residual_multiplier
        applied = {"attention_scale": model.scale}
        if model.residual != 1:
            applied["residual_multiplier"] = model.residual
        first = Role.PATCH_EMBEDDING if options.get("patches") else Role.TOKEN_EMBEDDING
        names = [name for name, _ in model.named_parameters()]
        rules = [Rule("first.weight", first), *RULES]
        rules = [rule for rule in rules if any(map(rule.matches, names))]
        wd, mode = self.decay
        numbers = {"lr": self.lr, "eps": 1e-30 if rule.optimizer == "adafactor" else 1e-8}
        numbers |= {"weight_decay": wd, "decay_mode": mode, "absorb_multipliers": self.absorb}
        return model, plan(model, rules, rule, **numbers, applied=applied, head_dim=head_dim)


DECAYS = ((0.01, "independent"), (0.01, "global"), (0.01, "per_group"), (0.0, None))
RATES = {"sgd": 0.02, "muon": 0.02}


def subjects(seed: int) -> list[Subject]:
    """All rules of the table; decays are drawn."""
    draw, found = random.Random(seed), []

    def add(label, make, **fields):
        optimizer = make(fields.get("sizes", (32,))[0]).optimizer
        fields = {"lr": RATES.get(optimizer, 2**-8), "decay": draw.choice(DECAYS), **fields}
        found.append(Subject(label, make, **fields))

    optimizers = ("sgd", "adam", "adafactor", "adam_param_scaling", "adam_atan2")
    names = ("standard", "ntk", "mup", "mean_field")
    for name, optimizer, alignment in itertools.product(names, optimizers, ("full", "none")):
        follows, own = draw.random() < 0.5, (optimizer, alignment)
        bare = lambda n, name=name, own=own: Everett(name, n, 32, *own)
        rule = (lambda n, inside=bare: EpsFollows(inside(n))) if follows else bare
        add(f"everett {name} {optimizer} {alignment} {follows}", rule)
    per_step, plain = (0.01, "independent"), (("vectors", False),)
    for exponent in (-0.5, -1.0):
        decayed = lambda n, e=exponent: Decay(Everett("mup", n, 32), exponent=e)
        add(f"everett mup decay {exponent}", decayed, decay=per_step)
    for name in ("mup", "standard"):
        experts = lambda n, name=name: Everett(name, n, 32)
        add(f"everett {name} experts", experts, model=(("experts", True),))
    deep = {"size": "depth", "sizes": (2, 4, 8)}
    for alpha in (0.5, 1.0):
        rule = lambda n, alpha=alpha: CompleteP(32, 32, n, 2, alpha=alpha)
        add(f"completep {alpha}", rule, **deep, decay=per_step)
    strategies = ("neural_tangent", "hybrid", "maximal_update")
    for strategy, optimizer in itertools.product(strategies, ("adam", "sgd")):
        add(
            f"dinan {strategy} {optimizer}",
            lambda n, s=strategy, o=optimizer: Dinan(n, strategy=s, optimizer=o),
            model=(*plain, ("patches", True)),
            lr=0.25 if optimizer == "adam" else 0.5,
            decay=draw.choice([(1e-3, "global"), (0.0, None)]),
        )
    scans = {  # of the size: the key that grows, its values, the other sizes
        "width": ("heads", (4, 8, 16), {"head_dim": 8, "depth": 2}),
        "head_dim": ("head_dim", (8, 16, 32), {"heads": 4, "depth": 2}),
        "depth": ("depth", (2, 4, 8), {"head_dim": 8, "heads": 4}),
    }
    for optimizer, (size, (key, sizes, fixed)) in itertools.product(("adam", "sgd"), scans.items()):
        rule = lambda n, key=key, own={**fixed, "optimizer": optimizer}: Bordelon(**own, **{key: n})
        scan = {"size": size, "sizes": sizes, "lr": 2**-5, "model": plain}
        add(f"bordelon {size} {optimizer}", rule, **scan)
    for convention in ("spectral", "original", "match_rms"):
        add(f"muon {convention}", lambda n, c=convention: Muon(Everett("mup", n, 32), c))
    init = {role: 0.1 for roles in KINDS.values() for role in map(str, roles)}
    add("recipe", lambda n: Tuned(Everett("mup", n, 32), init=init))
    for optimizer in ("adam", "sgd", "adafactor"):
        add(f"mine {optimizer}", lambda n, o=optimizer: Mine(n, o))
    add("everett mup embedding -0.5", lambda n: Everett("mup", n, 32, embedding_exponent=-0.5))
    return found


@dataclasses.dataclass(frozen=True)
class Case:
    """A subject with a mistake in it; none where the power is 0. `only` is the one size that has
    it, then the number is twice as large there."""

    subject: Subject
    kind: str = "hidden"
    number: str = "rate"
    power: float = 0.0
    only: int | None = None

    def plan(self, size: int) -> Plan:
        """The plan at a size with the mistake."""
        right = built(self.subject)[size][1]
        if self.only is not None:
            twice = 2.0 if size == self.only else 1.0
            return plant(right, self.kind, self.number, 1.0, twice)
        ratio = size / self.subject.sizes[0]
        return plant(right, self.kind, self.number, self.power, ratio)

    def __str__(self):
        where = f"{self.power:+g}" if self.only is None else f"at {self.only} alone"
        return f"{self.subject.label}: {self.kind} {self.number} {where}"


def invisible(case: Case) -> str:
    """Why a planted power is no mistake; "" where it is one. All are of a rule of no paper: what a
    paper says is exact."""
    if not case.subject.label.startswith("mine") or case.only is not None:
        return ""
    if case.number == "eps" and case.power < 0:
        return "an epsilon that falls with the gradients is Everett et al.'s section 4.3"
    if case.number == "eps" and case.kind in ("readout", "bias") and case.power < 1:
        return "one constant epsilon grows as much beside the gradient at mean field's readout"
    if case.number == "eps" and case.power < 1 and case.subject.label.endswith("adafactor"):
        return "Adafactor adds epsilon to the gradient's square: a quarter power of the gradient"
    if case.number == "decay" and case.power < 0:
        return "a decay may fall with the width: Fan et al. 2025 (-1/2), Qiu et al. 2025 (-1)"
    return ""


def cases(seed: int, wrong: int, right: int) -> Iterator[Case]:
    """Right plans, then planted ones, drawn at random: every subject as often as any other."""
    draw, found = random.Random(seed), subjects(seed)
    for i in range(right):
        yield Case(found[i % len(found)])
    drawn: set[Case] = set()
    while len(drawn) < wrong:
        subject = found[len(drawn) % len(found)]
        made = right_plans(subject)[subject.sizes[0]]
        kind, number = draw.choice([*KINDS]), draw.choice(NUMBERS)
        only = draw.choice(subject.sizes) if draw.random() < 0.15 else None
        case = Case(subject, kind, number, draw.choice(POWERS), only)
        if case not in drawn and acts(made, kind, number) and not invisible(case):
            drawn.add(case)
            yield case


@functools.cache
def built(subject: Subject) -> dict[int, tuple[Tiny, Plan]]:
    """The subject's models and right plans by size."""
    return {size: subject.build(size) for size in subject.sizes}


def right_plans(subject: Subject) -> dict[int, Plan]:
    return {size: made for size, (_, made) in built(subject).items()}
