"""This repository and `mup` 1.0.0 on the same three models: user code, edits, rates, mistakes.

    pip install --no-deps --target FOLDER mup==1.0.0
    PYTHONPATH=FOLDER python -m benchmarks.mup_comparison

Prints the tables under "Beside mup" in param_groups/README.md. Rates are those of m W for a forward
multiplier m, m lr under Adam and m^2 lr under SGD; their growth from the base width to 4 times
that is compared in float64. Initial values are random: of m std only the power is compared.
"""

import inspect
import math
import sys
from functools import partial

try:
    import mup
    from mup import MuAdamW, MuReadout, MuSGD, set_base_shapes
except ImportError as missing:
    sys.exit(f"{missing}: the first lines of benchmarks/mup_comparison.py say how to install mup")

import torch
from measure.stock import sizes
from torch import nn
from torch.optim import SGD, AdamW

from param_groups import Everett, PlanError, Role, Rule, plan, rules_for
from param_groups.stock.rules import stock

BASE, TIMES, LR = 64, 4, 0.01


def mlp(width, readout=nn.Linear):
    """Twelve inputs, ten classes."""
    layers = nn.Linear(12, width), nn.Linear(width, width), readout(width, 10)
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def library(name, width, **options):
    """A small model of Hugging Face's or timm's, with heads of 16 at every width."""
    return stock(name, **sizes(name, width), **options)


gpt2, vit = partial(library, "hf:gpt2"), partial(library, "timm:vit_small_patch16_224")

# ------------------------------------------------------------------------------------------------
# The code of a user: every line counts


def mup_mlp(width, optimizer):
    base, delta, model = (mlp(n, MuReadout) for n in (BASE, 2 * BASE, width))
    set_base_shapes(model, base, delta=delta)
    return model, optimizer(model.parameters(), lr=LR)


def mup_transformer(make, head, width, optimizer):
    base, delta, model = (make(n) for n in (BASE, 2 * BASE, width))
    for made in (base, delta, model):
        rows, columns = getattr(made, head).weight.shape
        setattr(made, head, MuReadout(columns, rows, bias=getattr(made, head).bias is not None))
    set_base_shapes(model, base, delta=delta)
    for parameter in model.parameters():  # the libraries draw std 0.02 at every width
        if parameter.ndim == 2:
            mup.normal_(parameter, std=0.02)
    return model, optimizer(model.parameters(), lr=LR)


MLP_RULES = [
    Rule("0.weight", Role.PATCH_EMBEDDING),
    Rule("2.weight", Role.HIDDEN),
    Rule("4.weight", Role.READOUT),
    Rule("4.bias", Role.READOUT_BIAS),
    Rule("[02].bias", Role.HIDDEN_BIAS),
]


def our_mlp(width, family, optimizer):
    model = mlp(width)
    rule = Everett("mup", width, BASE, optimizer=family)
    numbers = plan(model, MLP_RULES, rule, lr=LR, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    return model, optimizer(numbers.groups(model))


def our_transformer(make, width, family, optimizer):
    model = make(width)
    rule = Everett("mup", width, BASE, optimizer=family, qk_exponent=-0.5)
    numbers = plan(model, rules_for(model), rule, lr=LR, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    return model, optimizer(numbers.groups(model))


# ------------------------------------------------------------------------------------------------
# Numbers of both
def lines(function):
    """Lines in the body of a user's function; of rules, one each."""
    written = getattr(function, "func", function)
    return len(inspect.getsource(written).splitlines()) - 1 + len(MLP_RULES) * (written is our_mlp)


def effective(model, optimizer, power):
    """{name: (m^power lr, m std)}: mup's readout divides its input by the ratio of widths."""
    names, found = {parameter: name for name, parameter in model.named_parameters()}, {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            layer = model.get_submodule(names[parameter].rpartition(".")[0])
            scaled = isinstance(layer, MuReadout) and parameter is layer.weight
            m = 1 / layer.width_mult() if scaled else 1.0
            size = parameter.detach().double().std().item()
            found[names[parameter]] = (m**power * group["lr"], m * size)
    return found


def growth(prepared, power):
    """{name: (growth of the rate, power of the initial size)} from the base width on."""
    torch.manual_seed(0)
    small, large = (effective(*prepared(n), power) for n in (BASE, TIMES * BASE))
    power_of = lambda one, other: one and round(2 * math.log(other / one, TIMES)) / 2
    return {
        name: (large[name][0] / rate, power_of(size, large[name][1]))
        for name, (rate, size) in small.items()
    }


def agreement(theirs, ours, family):
    """How many tensors grow alike: rates, and initial sizes; and the names of the others."""
    power, torchs, mups = {"adam": (1, AdamW, MuAdamW), "sgd": (2, SGD, MuSGD)}[family]
    one = growth(lambda width: theirs(width, mups), power)
    two = growth(lambda width: ours(width, family, torchs), power)
    rates = sum(math.isclose(one[name][0], two[name][0], rel_tol=1e-12) for name in one)
    odd = [name for name in one if one[name][1] != two[name][1]]
    return f"{rates} of {len(one)}", f"{len(one) - len(odd)} of {len(one)}", ", ".join(odd) or "-"


# ------------------------------------------------------------------------------------------------
# Mistakes


def met(attempt, otherwise="silent"):
    """What a mistake meets: an error, or nothing."""
    try:
        attempt()
    except (AssertionError, PlanError, RuntimeError) as error:
        return f"`{type(error).__name__}`"
    return otherwise


def frozen(model, prepare):
    """What preparing a model does to a frozen readout."""
    before = model[4].weight.requires_grad_(False).clone()
    prepare(model)
    return "kept" if torch.equal(before, model[4].weight) else "silent: rescaled"


def mistakes():
    """(mistake, mup, here) for muP at 4 times the base width."""
    n = TIMES * BASE
    full, library_power = (Everett("mup", n, BASE, qk_exponent=power) for power in (None, -0.5))

    def planned(model, rules=MLP_RULES, rule=full):
        return plan(model, rules, rule, lr=LR, absorb_multipliers=True)

    def ready(model, rules=MLP_RULES):
        return planned(model, rules).initialise(model, seed=0) or model

    def based(model, base=BASE, delta=2 * BASE, kind=MuReadout):
        return set_base_shapes(model, mlp(base, kind), delta=mlp(delta, kind))

    tied, base, delta = (gpt2(width, tie_word_embeddings=True) for width in (n, BASE, 2 * BASE))
    of_tied = [rule for rule in rules_for(gpt2(n)) if rule.role is not Role.READOUT]
    wrong = [Rule("2.weight", Role.PATCH_EMBEDDING), *MLP_RULES[:1], *MLP_RULES[2:]]
    ours = met(lambda: planned(mlp(n), MLP_RULES[:2] + MLP_RULES[3:]))
    yield "the readout is forgotten", met(lambda: based(mlp(n), kind=nn.Linear)), ours
    ours = met(lambda: planned(model := mlp(n)).groups(model))
    theirs = met(lambda: MuAdamW(mlp(n, MuReadout).parameters(), lr=LR))
    yield "groups of a model that was not prepared", theirs, ours
    ours = met(lambda: planned(tied, of_tied, library_power))
    yield "a tied word embedding", met(lambda: set_base_shapes(tied, base, delta=delta)), ours
    ours = met(lambda: ready(ready(mlp(n))), "the same as once")
    yield "prepared twice", met(lambda: based(based(mlp(n, MuReadout)))), ours
    ours = met(lambda: planned(mlp(n), rule=Everett("mup", BASE, BASE)))
    theirs = met(lambda: based(mlp(n, MuReadout), base=n, delta=n))
    yield "two widths mixed up: the model as its base, a plan of the base width", theirs, ours
    ours = met(lambda: planned(model := gpt2(n), rules_for(model)))
    yield "muP's 1/d in attention is forgotten", met(lambda: mup_gpt2(n, MuAdamW)), ours
    yield "a frozen, pretrained readout", frozen(mlp(n, MuReadout), based), frozen(mlp(n), ready)
    yield "a matrix with the role of another", "has no roles", met(lambda: ready(mlp(n), wrong))
    theirs = met(lambda: AdamW(based(mlp(n, MuReadout)).parameters()))
    ours = met(lambda: AdamW(ready(mlp(n)).parameters()))
    yield "`AdamW(model.parameters())` all the same", theirs, ours


mup_gpt2, mup_vit = partial(mup_transformer, gpt2, "lm_head"), partial(mup_transformer, vit, "head")
our_gpt2, our_vit = partial(our_transformer, gpt2), partial(our_transformer, vit)

if __name__ == "__main__":
    print("| model | lines, mup | lines, here | rates, Adam | rates, SGD | initial | except |")
    print("|---|---|---|---|---|---|---|")
    both = {"MLP": (mup_mlp, our_mlp), "GPT-2": (mup_gpt2, our_gpt2), "ViT": (mup_vit, our_vit)}
    for name, (theirs, ours) in both.items():
        adam, starts, odd = agreement(theirs, ours, "adam")
        sgd = agreement(theirs, ours, "sgd")[0]
        print(f"| {name} | {lines(theirs)} | {lines(ours)} | {adam} | {sgd} | {starts} | {odd} |")
    print("\n| mistake | mup | here |\n|---|---|---|")
    for row in mistakes():
        print("|", *(f"{cell} |" for cell in row))
