"""Train one Vision Transformer: `python -m vit_cifar5m.train vit_cifar5m/configs/laptop.yaml`.

Also `accelerate launch -m vit_cifar5m.train ...`.
"""

from __future__ import annotations

from typing import Any

from training.errors import UserError
from training.experiment import Experiment
from vit_cifar5m import cost
from vit_cifar5m.config import Config


def prescription(config: Config):
    """The paper's rule at the model's head dimension, heads and depth."""
    from param_groups import Bordelon

    shape = config.model
    return Bordelon(
        head_dim=shape.head_dim,
        heads=shape.heads,
        depth=shape.layers,
        optimizer=config.optimizer.name,
        **config.prescription.model_dump(),
    )


def build_model(config: Config):
    """The paper's Vision Transformer, allocated but not initialised: the plan does that."""
    from vit_cifar5m.model import VisionTransformer

    return VisionTransformer(config.model)


def build_plan(config: Config, model):
    """Every tensor's numbers; the model may be on the meta device."""
    from param_groups import plan
    from vit_cifar5m.model import ROLES

    return plan(model, ROLES, prescription(config), **config.optimizer.numbers)


def build_blank(config: Config, rows: int):
    """A model without values, its loss, and a batch of full samples without content: no data."""
    import torch

    images, labels = torch.empty(rows, 3, 32, 32), torch.empty(rows, dtype=torch.int64)
    return build_model(config), loss, (images, labels)


def loss(model, batch):
    """The summed loss in nats."""
    from vit_cifar5m.model import cross_entropy

    return cross_entropy(model(batch[0]), batch[1])


def build_data(config: Config):
    """Images for training and validation; UserError if their classes are not the model's."""
    from training import processes
    from vit_cifar5m import data

    settings = config.training
    visits = settings.steps * settings.batch_size
    with processes.state().main_process_first():  # what the cache lacks is put there once
        images = data.from_config(config.data, config.order_seed, visits)
    classes = images.classes
    if classes != config.model.classes:
        raise UserError(
            f"model.classes {config.model.classes}, but the images of data.source "
            f"{config.data.source} have {classes} classes; set model.classes={classes}"
        )
    data.check_single_visit(config.data, len(images.train), settings.steps, settings.batch_size)
    return images


def build_task(config: Config):
    """Model, plan, data and loss of a config, for the loop and for the coordinate check."""
    import torch

    from measure.observations import ObservationRecorder
    from measure.probes import ProbeRecorder
    from training import sharding
    from training.task import Task
    from vit_cifar5m import data
    from vit_cifar5m.model import measure

    images = build_data(config)
    with sharding.building():
        model = build_model(config)
    return Task(
        config=config,
        model=model,
        plan=build_plan(config, model),
        train_data=images.train,
        eval_data=images.validation,
        loss=loss,
        count=lambda batch: torch.tensor(len(batch[0])),
        collate=data.collate,
        forward=lambda model, batch: model(batch[0]),
        measure=lambda model, batch: measure(model(batch[0]), batch[1]),
        recorders=[ProbeRecorder(), ObservationRecorder()],
    )


def arithmetic(task) -> list[str]:
    """How the run's numbers come about: images seen and left, and the rate."""
    config, images = task.config, len(task.train_data)
    settings, optimizer = config.training, config.optimizer
    seen = settings.steps * settings.batch_size
    factor = prescription(config).lr_factor
    floor = 1.0 if config.schedule.name == "constant" else config.floor
    return [
        f"length {settings.steps:,} steps = {seen:,} images, {seen / images:.3g} of the source's "
        f"{images:,}",
        f"rate {optimizer.lr:g} to {floor * optimizer.lr:g}, {config.schedule.name}, times "
        f"{factor:g} in every group",
    ]


def result(summary: dict[str, Any]) -> str:
    """A finished run's outcome."""
    top1 = summary.get("best_eval_top1")
    best = "no evaluation" if top1 is None else f"best top-1 {top1:.4f}"
    return f"{best}, {summary['targets_per_second']:.1f} images/s"


EXPERIMENT = Experiment.of(globals(), cost)

if __name__ == "__main__":
    EXPERIMENT.main()
