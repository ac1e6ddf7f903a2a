"""The settings that every run has: optimiser, schedule, loop and checkpoints.

An experiment's config is a `RunConfig` with its model, prescription and data added.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from param_groups.families import OPTIMIZER_FAMILY
from training.config import (
    Count,
    Fraction01,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    Size,
)
from training.errors import UserError

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZER_FAMILY)]


def default_epsilon(optimizer: str) -> float:
    """Everett et al., App. C; Adafactor adds it to g^2."""
    return 1e-30 if optimizer == "adafactor" else 1e-9


class OptimizerConfig(Section):
    """The update rule and its global numbers; the plan derives every tensor's own."""

    name: OptimizerName = "adam"
    """Update rule."""
    lr: PositiveFloat
    """Global learning rate, multiplied by each role's factor."""
    beta1: Fraction01 = 0.9
    """Decay of the first moment (Adam family, and what muon leaves to AdamW)."""
    beta2: Fraction01 = 0.98
    """Decay of the second moment (Adam family); NanoDO's default."""
    eps: NonNegativeFloat | None = None
    """Global epsilon, multiplied by each role's factor; by default 1e-9, 1e-30 for adafactor."""
    momentum: Fraction01 = 0.9
    """Heavy-ball momentum (sgd), or that of muon's matrices."""
    atan2_lambda: PositiveFloat = 8.0
    """lambda of adam_atan2's update (Everett et al., C.3)."""
    min_dim_factored: PositiveInt | None = None
    """Axes that adafactor factors have at least so many entries; by default 128, as in optax."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay; its meaning is `decay_mode`."""
    decay_mode: Literal["independent", "global", "per_group"] = "independent"
    """One step removes: wd (independent), lr*wd (global), or the tensor's own lr*wd (per_group)."""
    clip_norm: PositiveFloat | None = None
    """Largest L2 norm of the whole gradient; none by default."""

    @model_serializer(mode="wrap")
    def _used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A key that came later is omitted where it does not act, so that run ids stay."""
        acts = self.name == "adafactor" and self.min_dim_factored is not None
        idle = set() if acts else {"min_dim_factored"}
        return {key: value for key, value in dump(self).items() if key not in idle}

    @model_validator(mode="after")
    def _decay_has_its_mode(self) -> OptimizerConfig:
        if self.weight_decay and "decay_mode" not in self.model_fields_set:
            raise ValueError(
                f"optimizer.weight_decay {self.weight_decay:g} needs optimizer.decay_mode: a step "
                f"removes {100 * self.weight_decay:.4g} % of a tensor with 'independent', its own "
                "rate times that with 'per_group' (torch's), lr times that with 'global'"
            )
        return self

    @property
    def epsilon(self) -> float:
        """`eps`, or the optimiser's own."""
        return default_epsilon(self.name) if self.eps is None else self.eps

    @property
    def numbers(self) -> dict[str, Any]:
        """What `param_groups.plan` makes every tensor's numbers of."""
        own = {key: getattr(self, key) for key in ("lr", "weight_decay", "decay_mode")}
        return {**own, "eps": self.epsilon}


class ScheduleConfig(Section):
    """One factor in [0, 1] on every group's rate."""

    name: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    steps: PositiveInt | None = None
    """Length of the whole schedule, by default training.steps; a run may end before."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Final factor, as a fraction of each group's peak rate."""
    min_lr: NonNegativeFloat = 0.0
    """Final rate in units of optimizer.lr, in place of floor: floor = min_lr / lr."""


class LoopConfig(Section):
    """Length, batching, evaluation and precision of a run."""

    steps: PositiveInt
    """Optimiser steps."""
    batch_size: Size
    """Samples per optimiser step, over all processes and micro-batches."""
    micro_batch_size: Size | None = None
    """Samples per forward pass of one process; by default the process's whole share."""
    log_every: PositiveInt = 10
    """Steps between lines of metrics.jsonl."""
    eval_every: Count = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    eval_per_octave: Annotated[int, Field(ge=0, le=64)] = 0
    """Evaluations per doubling of the step, from step 1 on: for axes that are logarithmic. Beside
    those of eval_every; 0 for none."""
    eval_batch_size: Size = 64
    """Samples per forward pass of an evaluation, per process."""
    eval_samples: PositiveInt | None = None
    """Validation samples to use, from the first on; all by default."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run the forward pass under autocast; weights and optimiser state stay float32.
    On a processor without bf16 units a bf16 run says so and is float32. fp16 scales the loss as
    torch.amp.GradScaler does, logs the scale, and skips steps as skip_overflow does."""
    compile: bool = False
    """torch.compile the model."""
    cuda_graphs: bool = False
    """Record the compiled model's launches once and replay them: for models so small that launches
    decide (D <= 512), as torch.compile's mode reduce-overhead. Takes memory; changes no number."""
    data_workers: Annotated[int, Field(ge=0, le=1024)] = 0  # all start at once, on one machine
    """Data-loading processes; they change nothing but speed."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Where curves are shown besides metrics.jsonl; see training/README.md."""
    gradient_scale: bool = False
    """Log, for each role of tensors, the RMS of its clipped gradient over its epsilon."""
    skip_overflow: bool = False
    """Skip a step whose loss or gradient is not finite, and log it, as fp16 training does."""
    divergence_factor: Annotated[float, Field(gt=1)] = 3.0
    """A run has diverged when its loss is NaN or exceeds this multiple of its first loss."""
    probe_every: Count = 0
    """Steps between probes of every tensor and dense layer, from the first on; 0 for none."""
    probe_samples: PositiveInt = 8
    """Validation samples that a probe's forward pass sees, from the first on. For text, rows
    without padding are used first."""

    @model_validator(mode="after")
    def _graphs_are_of_compiled_models(self) -> LoopConfig:
        if self.cuda_graphs and not self.compile:
            raise ValueError("training.cuda_graphs acts with training.compile; set both or neither")
        return self

    def split(self, processes: int) -> tuple[int, int]:
        """Into how many micro-batches a process splits its share of a step's batch, and of how many
        samples (the last one may be smaller); UserError where the batch has no equal shares."""
        share, rest = divmod(self.batch_size, processes)
        if rest:
            raise UserError(
                f"training.batch_size {self.batch_size} does not divide by {processes} processes; "
                "change one of them"
            )
        micro = min(self.micro_batch_size or share, share)
        return -(-share // micro), micro

    def _unused(self) -> tuple[str, ...]:
        """Keys that ask for nothing: omitted, so that run ids do not change."""
        return () if self.eval_per_octave else ("eval_per_octave",)

    @model_serializer(mode="wrap")
    def _used(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in dump(self).items() if key not in self._unused()}


class ObservedLoopConfig(LoopConfig):
    """The loop of an experiment whose model `measure.representations` can observe."""

    observe_every: Count = 0
    """Steps between observations of the representations, from step 0 on; 0 for none."""
    observe_samples: PositiveInt = 8
    """Validation samples that an observation sees, from the first on. For text, only rows without
    padding are used."""

    @model_validator(mode="after")
    def _samples_are_observed(self) -> ObservedLoopConfig:
        if "observe_samples" in self.model_fields_set and not self.observe_every:
            raise ValueError(
                f"training.observe_samples {self.observe_samples} is given, but nothing is "
                "observed; set training.observe_every or leave it out"
            )
        return self

    def _unused(self) -> tuple[str, ...]:
        own = () if self.observe_every else ("observe_every", "observe_samples")
        return (*super()._unused(), *own)


class CheckpointConfig(Section):
    """How a run survives; nothing here changes its numbers or makes it another run."""

    every: Count = 0
    """Steps between checkpoints; 0 leaves it to `minutes`."""
    minutes: PositiveFloat | None = 10.0
    """Longest time between checkpoints; null leaves it to `every`."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; a second one serves if the first is damaged."""
    final: bool = False
    """Keep a finished run's last checkpoint; by default a finished run keeps none."""
    resume: Literal["auto", "never"] = "auto"
    """Resume from the newest good checkpoint, or start an unfinished run again and delete them."""


class RunConfig(Section):
    """What the training loop reads of an experiment's config; experiments add their own."""

    without_effect: ClassVar[tuple[str, ...]] = (
        "checkpoint",
        "training.cuda_graphs",
        "training.data_workers",
        "training.trackers",
    )
    """Keys that say how or where a run is computed: no part of which run it is."""
    constants: ClassVar[Mapping[str, Any]] = {}
    """section.key of values that no config can change but that enter the run id."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the initial weights and, unless a data.seed is set, of the data order."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: LoopConfig
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def order_seed(self) -> int:
        """What the data's order follows from."""
        return self.seed

    @property
    def floor(self) -> float:
        """The schedule's final factor."""
        return self.schedule.min_lr / self.optimizer.lr or self.schedule.floor

    @model_validator(mode="after")
    def _schedule_fits(self) -> RunConfig:
        schedule, lr = self.schedule, self.optimizer.lr
        if schedule.floor and schedule.min_lr:
            raise ValueError("schedule.floor and schedule.min_lr say the same; keep one")
        if schedule.min_lr > lr:
            raise ValueError(
                f"schedule.min_lr {schedule.min_lr:g} is more than optimizer.lr {lr:g}; it is the "
                "rate that the schedule ends with"
            )
        planned = schedule.steps
        if planned is not None and planned < self.training.steps:
            raise ValueError(
                f"schedule.steps {planned} is less than training.steps {self.training.steps}; "
                "raise it or leave it out"
            )
        if schedule.warmup_steps > (planned or self.training.steps):
            raise ValueError(
                f"schedule.warmup_steps {schedule.warmup_steps} is more than training.steps "
                f"{self.training.steps}; lower it"
            )
        return self
