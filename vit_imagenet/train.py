"""Train one Vision Transformer: `python -m vit_imagenet.train vit_imagenet/configs/laptop.yaml`.

Also `accelerate launch -m vit_imagenet.train ...`.
"""

from __future__ import annotations

from typing import Any

from training.experiment import Experiment
from vit_imagenet import cost
from vit_imagenet.config import Config


def prescription(config: Config):
    """The config's strategy at the model's width (Dinan et al., Part II, section 1)."""
    from param_groups import Dinan
    from vit_imagenet.rates import DinanFactors

    fields = config.prescription.model_dump()
    factors = {key: fields.pop(key) for key in list(fields) if key.endswith("_lr")}
    kind = DinanFactors if factors else Dinan
    return kind(
        width=config.model.width,
        optimizer=config.optimizer.name,
        init="vit",
        **fields,
        **factors,
    )


def build_model(config: Config):
    """timm's VisionTransformer, allocated but not initialised: the plan does that."""
    from vit_imagenet.model import build

    return build(config.model)


def build_plan(config: Config, model):
    """Every tensor's numbers; the model may be on the meta device."""
    from param_groups import plan
    from vit_imagenet.model import ROLES

    roles = ROLES if config.model.head_bias else ROLES[:-1]
    return plan(model, roles, prescription(config), **config.optimizer.numbers)


def build_blank(config: Config, rows: int):
    """A model without values, its loss, and a batch of full samples without content: no data."""
    import torch

    shape = config.model
    images = torch.empty(rows, 3, shape.image_size, shape.image_size)
    return build_model(config), loss, (images, torch.empty(rows, shape.classes))


def loss(model, batch):
    """The summed loss in nats."""
    from vit_imagenet.losses import soft_cross_entropy

    return soft_cross_entropy(model(batch[0]), batch[1])


def build_task(config: Config):
    """Model, plan, data and loss of a config, for the loop and for the coordinate check."""
    from measure.probes import ProbeRecorder
    from training import processes, sharding
    from training.task import Task
    from vit_imagenet import data, losses, transforms

    with processes.state().main_process_first():  # an Arrow copy of shards is made once
        images = data.from_config(
            config.data,
            image_size=config.model.image_size,
            classes=config.model.classes,
            seed=config.seed,
        )
    with sharding.building():
        model = build_model(config)
    return Task(
        config=config,
        model=model,
        plan=build_plan(config, model),
        train_data=images.train,
        eval_data=images.validation,
        loss=loss,
        count=losses.count,
        collate=transforms.Collate(config.data.augmentation, config.model.classes, config.seed),
        forward=lambda model, batch: model(batch[0]),
        by_epoch=True,
        eval_collate=transforms.eval_collate,
        measure=lambda model, batch: losses.measure(model(batch[0]), batch[1]),
        recorders=[ProbeRecorder()],
    )


def arithmetic(task) -> list[str]:
    """How the run's numbers come about: epochs, and the decay that all strategies share."""
    config, images = task.config, len(task.train_data)
    settings, optimizer = config.training, config.optimizer
    per_epoch = max(1, images // settings.batch_size)
    floor = config.floor * optimizer.lr

    def epochs(steps: int) -> str:
        return f"{steps:,} steps = {steps / per_epoch:g} epochs"

    return [
        f"epoch {images:,} images = {per_epoch:,} steps, {images % settings.batch_size:,} left out",
        f"length {epochs(settings.steps)}; warm-up {epochs(config.schedule.warmup_steps)}; "
        f"evaluation every {epochs(settings.eval_every or settings.steps)}",
        f"rate {optimizer.lr:g} to {floor:g}, {config.schedule.name}; decay per step at the peak: "
        f"lr wd = {optimizer.lr * optimizer.weight_decay:g} ({optimizer.decay_mode})",
    ]


def result(summary: dict[str, Any]) -> str:
    """A finished run's outcome."""
    top1 = summary.get("best_eval_top1")
    best = "no evaluation" if top1 is None else f"best top-1 {top1:.4f}"
    return f"{best}, {summary['targets_per_second']:.1f} images/s"


EXPERIMENT = Experiment.of(globals(), cost)

if __name__ == "__main__":
    EXPERIMENT.main()
