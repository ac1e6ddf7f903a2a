"""Small models with their plans, optimisers and probes."""

import math

import torch
from torch import nn

from measure.probes import Probes
from nanolm_c4.model import RULES, Decoder
from param_groups import Everett, Muon, plan
from training.optim import optimizers

MUON = Muon(Everett("mup", 16, 8))


def planned(model, rules, prescription, **numbers):
    """(model, plan, the prescription's optimiser): what probes take."""
    made = plan(model, rules, prescription, **{"lr": 0.1, **numbers})
    groups = made.groups(model, check=False, several=True)
    return model, made, optimizers.build(prescription.optimizer, groups)


def decoder(parameterization="mup", rule="adam", eps=1e-9, lr=0.01, **changes):
    """A small decoder in the given parameterisation with its plan and optimiser."""
    sizes = {"vocab_size": 40, "context": 8, "layers": 2, "heads": 2, "head_dim": 8}
    model = Decoder(**{**sizes, "mlp_ratio": 2, "attention_scale": 0.3, **changes})
    prescription = Everett(parameterization, 16, 8, optimizer=rule) if rule != "muon" else MUON
    numbers = {"lr": lr, "eps": eps, "weight_decay": 1e-3, "decay_mode": "independent"}
    found = planned(model, RULES, prescription, **numbers)
    found[1].initialise(model, 0)
    return found


def probed(*args, **options):
    model, numbers, optimizer = decoder(*args, **options)
    return model, Probes(model, numbers, optimizer), optimizer


def single(layer, rules, width, **options):
    """A model of one layer called `layer`, its plan and plain SGD."""
    model = nn.Module()
    model.layer = layer
    model.forward = lambda *args: model.layer(*args)
    return planned(model, rules, Everett("standard", width, width, optimizer="sgd"), **options)


def rows(seed=0, batch=3):
    """Tokens for the decoder, and the next ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 40, (batch, 9), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def backward(model, seed=0):
    (model(*rows(seed)) / 24).backward()


def step_between(probe, optimizer):
    """A step with the gradients that are there, between the probes' two calls."""
    probe.before_step()
    optimizer.step()
    probe.after_step()


def probed_step(model, probe, optimizer, seed=0):
    """One step of the decoder with its line; the gradients are left in place."""
    optimizer.zero_grad()
    backward(model, seed)
    step_between(probe, optimizer)
    return probe.read(lambda: model(rows()[0]))


def rms(tensor):
    return tensor.detach().double().square().mean().sqrt().item()


def logits(block):
    """The attention logits of a captured block, (B, H, T, T), NaN where they are masked (eq. 7)."""
    found = block.scale * block.queries @ block.keys.transpose(-1, -2)
    later = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
    return found.masked_fill(later, math.nan) if block.causal else found
