"""A model of your own under the coordinate check: a plain torch MLP that learns random labels.

    param-groups check examples/coordinate_check_mlp.py

A file needs one function, `task(width, seed)`, that builds the model at a width and says how it is
trained. The plan below gives every tensor one rate at width BASE_WIDTH, in the parameterisation's
units; absorbing a multiplier into a tensor multiplies its rate by that (Adam).
"""

import torch
import torch.nn.functional as F
from torch import nn

from param_groups import Everett, Role, Rule, plan
from param_groups.check import Check

BASE_WIDTH, INPUTS, CLASSES, SAMPLES = 64, 32, 10, 32

RULES = (
    Rule("0.weight", Role.PATCH_EMBEDDING),  # a dense layer on inputs of order one
    Rule("2.weight", Role.MLP_IN),
    Rule("4.weight", Role.MLP_OUT),
    Rule("6.weight", Role.READOUT),
    Rule("*.bias", Role.HIDDEN_BIAS),
)


def task(width: int, seed: int) -> Check:
    """The MLP at a width under muP, whose multipliers are absorbed: torch's layers have none."""
    model = nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES, bias=False),
    )
    rule = Everett("mup", width=width, base_width=BASE_WIDTH)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(SAMPLES, INPUTS, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return Check(
        model=model,
        plan=plan(model, RULES, rule, lr=1e-3, absorb_multipliers=True),
        batches=[(images, labels)],
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
