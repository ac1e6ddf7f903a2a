"""The bias of a readout: how far one step of it moves the logits, over widths."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from param_groups import Everett, Role, Rule, plan

INPUTS, CLASSES = 8, 5
RULES = (
    Rule("0.weight", Role.PATCH_EMBEDDING),
    Rule("2.weight", Role.MLP_IN),
    Rule("4.weight", Role.READOUT),
    Rule("4.bias", Role.READOUT_BIAS),
)


def movement(width: int, parameterization: str, optimizer: str) -> float:
    """RMS of the change of the logits that one step of the bias causes."""
    model = nn.Sequential(
        nn.Linear(INPUTS, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )
    rule = Everett(parameterization, width, 64, optimizer=optimizer)
    numbers = plan(model, RULES, rule, lr=0.1, absorb_multipliers=True)
    numbers.initialise(model, seed=0)
    generator = torch.Generator().manual_seed(0)
    loss = F.cross_entropy(
        model(torch.randn(32, INPUTS, generator=generator)),
        torch.randint(CLASSES, (32,), generator=generator),
    )
    loss.backward()
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.AdamW}[optimizer]
    kind(numbers.groups(model)).step()
    return model[4].bias.detach().square().mean().sqrt().item()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("parameterization", ["standard", "ntk", "mup", "mean_field"])
def test_the_bias_of_a_readout_moves_the_logits_alike_at_every_width(parameterization, optimizer):
    """Its gradient is of order one at every width; with the embedding's rate it would grow."""
    widths = [64, 128, 256, 512, 1024]
    moved = [movement(width, parameterization, optimizer) for width in widths]
    slope = np.polyfit(np.log(widths), np.log(moved), 1)[0]
    assert slope == pytest.approx(0, abs=0.1)
    assert 0.001 < moved[0] < 0.2  # it does move
