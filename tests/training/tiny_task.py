"""A task small enough to be written again in plain torch: uneven targets, no dropout."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from param_groups import Everett, Role, Rule, plan
from training.config import validate
from training.settings import RunConfig
from training.task import Task

IGNORE = -100


class Tiny(nn.Module):
    """Bag of one token: embedding, then readout; sums the cross-entropy."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.readout = nn.Linear(8, 11, bias=False)

    def forward(self, ids, targets):
        logits = self.readout(self.embedding(ids))
        return F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
        )


class Rows(TensorDataset):
    """Rows of tokens with a different number of targets each."""

    def __init__(self, size=37, seed=3):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 11, (size, 6), generator=generator)
        self.targets = (self.ids * 3 + 1) % 11
        for row in range(size):
            self.targets[row, 1 + row % 6 :] = IGNORE
        super().__init__(self.ids, self.targets)


RULES = (Rule("embedding.weight", Role.TOKEN_EMBEDDING), Rule("readout.weight", Role.READOUT))


def task(**changes):
    """A task whose config is the default one with dotted keys changed."""
    settings = {
        "seed": 0,
        "optimizer": {"name": "adam", "lr": 0.05},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "training": {"steps": 12, "batch_size": 8, "log_every": 3},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            settings[section][name] = value
        else:
            settings[section] = value
    config = validate(RunConfig, settings, "test")
    model = Tiny()
    prescription = Everett("standard", 8, 8, optimizer=config.optimizer.name)
    numbers = plan(model, RULES, prescription, **config.optimizer.numbers)
    return Task(
        config=config,
        model=model,
        plan=numbers,
        train_data=Rows(),
        eval_data=Rows(size=21, seed=4),
        loss=lambda model, batch: model(*batch),
        count=lambda batch: (batch[1] != IGNORE).sum(),
    )


def weights(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def initial(**changes):
    """The model with the weights that it starts from."""
    run = task(**changes)
    run.plan.initialise(run.model, 0)
    return run.model


def mean_loss(model, data, ids):
    targets = data.targets[ids]
    return model(data.ids[ids], targets) / (targets != IGNORE).sum()
