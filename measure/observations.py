"""What a run records of its representations while it trains, and against which initial state.

    observations.jsonl              one line per observed step, finite numbers or null:
        {"step", "samples", "blocks": [{"block", ...}, ...], "all": {...}}
    observations/step_N.safetensors arrays of the same step, see `arrays_of`

The initial state is not stored: the plan draws it again from the seed.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from safetensors.torch import save
from torch import Tensor, nn

from measure import representations
from measure.representations import Capture, Forward, capture, rms
from training.errors import UserError
from training.files import checksum, parse_json, write_bytes
from training.log import Log, finite
from training.settings import ObservedLoopConfig
from training.task import LiveRun, Task, initialise

FOLDER = "observations"
# Over blocks these are averaged; all others are RMS or norms, whose squares are.
_AVERAGED = ("kernel_alignment", "kernel_change", "head_variance", "excess_kurtosis")


@dataclass(frozen=True)
class Observation:
    """Numbers of every block and of `all`, None where not finite, and arrays by name."""

    samples: int
    blocks: list[dict[str, float | None]]
    all: dict[str, float | None]
    arrays: dict[str, Tensor]
    outputs: Tensor

    def line(self, step: int) -> dict[str, Any]:
        """The line of observations.jsonl."""
        blocks = [{"block": index, **numbers} for index, numbers in enumerate(self.blocks)]
        return {"step": step, "samples": self.samples, "blocks": blocks, "all": self.all}


def observe(
    initial_model: nn.Module, model: nn.Module, batch: Any, forward: Forward
) -> Observation:
    """Measures `model` on a batch, and how far it is from `initial_model`.

    Per block l: "stream_rms" and "stream_change" of the residual stream after it; alignment and
    relative square error ("kernel_change") of its pooled kernel with the initial one;
    "attention_rms", "head_variance" and "excess_kurtosis" of the attention logits; and the
    movements of `representations.attention_movement` and `weight_movement`. "all" pools these over
    blocks, squares of RMS and of relative norms, the rest as it is, and adds "embedding_rms" and
    "embedding_change" of the stream before the first block, and "function_change", RMS of the
    logits' change. Arrays are those of `model`, see `arrays_of`.
    """
    start = capture(initial_model, batch, forward)
    now = capture(model, batch, forward)
    moved = representations.attention_movement(start, now, model)
    weights = representations.weight_movement(initial_model, model)
    blocks = [
        {**_of_block(start, now, index), **moved[index], **weights[index]}
        for index in range(len(now.blocks))
    ]
    whole = {
        "embedding_rms": rms(now.stream[0]),
        "embedding_change": rms(now.stream[0] - start.stream[0]),
        "function_change": rms(now.outputs - start.outputs),
    }
    return Observation(
        samples=len(now.outputs),
        blocks=[_finite(numbers) for numbers in blocks],
        all=_finite({**_pooled(blocks), **whole}),
        arrays=arrays_of(now),
        outputs=now.outputs,
    )


def _of_block(start: Capture, now: Capture, index: int) -> dict[str, float]:
    """Stream and attention of one block: numbers that need no weights."""
    before, after = start.stream[index + 1], now.stream[index + 1]
    kernels = [representations.pooled_kernel(h) for h in (before, after)]
    entries = now.blocks[index].entries()
    return {
        "stream_rms": rms(after),
        "stream_change": rms(after - before),
        "kernel_alignment": representations.kernel_alignment(kernels[1], kernels[0]),
        "kernel_change": representations.relative_square_error(kernels[1], kernels[0]),
        "attention_rms": rms(entries),
        "head_variance": representations.head_variance(entries),
        "excess_kurtosis": representations.excess_kurtosis(entries),
    }


def _pooled(blocks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    pooled = {}
    for name in blocks[0]:
        values = [numbers[name] for numbers in blocks]
        if name in _AVERAGED:
            pooled[name] = sum(values) / len(values)
        else:
            pooled[name] = math.hypot(*values) / math.sqrt(len(values))
    return pooled


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite(value) for name, value in numbers.items()}


def arrays_of(now: Capture) -> dict[str, Tensor]:
    """What is stored of a state, on the CPU, for B samples, T tokens, L blocks, H heads, K classes.

    "pooled_kernel" (B, B), "last_token_kernel" (B, B) and "spatial_kernel" (T, T) of sample 0 after
    the last block; "attention_entries" (L, P, H) of sample 0 at the places (token, attended) in
    "attention_places" (P, 2); "outputs" (B, K), the logits, of a language model only the last
    token's: all of them would be larger than a checkpoint.
    """
    last = now.stream[-1]
    places = attention_places(last.shape[1])
    arrays = {
        "pooled_kernel": representations.pooled_kernel(last),
        "last_token_kernel": representations.sample_kernel(last),
        "spatial_kernel": representations.spatial_kernel(last),
        "attention_entries": torch.stack(
            [
                torch.stack(
                    [representations.attention_entries(block, 0, *place) for place in places]
                )
                for block in now.blocks
            ]
        ),
        "attention_places": torch.tensor(places),
        "outputs": now.outputs if now.outputs.ndim == 2 else now.outputs[:, -1],
    }
    return {name: array.cpu().contiguous() for name, array in arrays.items()}


def attention_places(tokens: int) -> list[tuple[int, int]]:
    """Fixed (token, attended) places, the same for every model of a context; no mask has them."""
    last, middle = tokens - 1, tokens // 2
    return list(dict.fromkeys([(last, 0), (last, middle), (middle, 0), (last, last)]))


# ------------------------------------------------------------------------------------------------
# The states of a task's model


def eval_batch(task: Task, samples: int, device: torch.device) -> Any:
    """The first samples to observe as one batch; there must be as many, see `check_samples`."""
    data = task.observed_data
    return send_to_device(task.eval_batch([data[index] for index in range(samples)]), device)


def check_samples(task: Task, samples: int, key: str = "training.observe_samples") -> None:
    """Raises UserError, which names `key`, for more samples than the task has to observe."""
    data = task.observed_data
    if samples > len(data):
        advice = "lower it or give more validation data" if len(data) else "give more of it"
        raise UserError(
            f"{key} {samples} is more than the {len(data)} {getattr(data, 'unit', 'samples')} of "
            f"the validation data; {advice}"
        )


def forward_of(task: Task) -> Forward:
    """The task's `forward`; UserError where the task has none, or its model cannot be observed."""
    representations.attention_blocks(task.model)
    if task.forward is None:
        raise UserError(
            "observations need the logits: the experiment's task has no `forward` that returns "
            "them; give it one or set training.observe_every to 0"
        )
    return task.forward


def current_state(task: Task) -> nn.Module:
    """Separate modules around the model's parameters: hooks and modes leave training alone.

    Without the autocast that the loop puts around a model's forward pass.
    """
    return _twin(task.model, lambda parameter: parameter)


def initial_state(task: Task) -> nn.Module:
    """A copy of the model with the values that it starts from, which the seed decides."""
    cuda = {p.device for p in task.model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(cuda)):
        model = _twin(task.model, lambda p: nn.Parameter(torch.empty_like(p), p.requires_grad))
        initialise(replace(task, model=model))
    return model


def _twin(model: nn.Module, parameter: Callable[[nn.Parameter], nn.Parameter]) -> nn.Module:
    """A copy of the modules with each parameter replaced by what `parameter` makes of it."""
    replaced = {id(own): parameter(own) for own in model.parameters()}
    twin = copy.deepcopy(model, {**replaced})
    twin.__dict__.pop("forward", None)  # the autocast around the class's own
    return twin


# ------------------------------------------------------------------------------------------------
# Files of a run


class ObservationLog(Log):
    """observations.jsonl; without its line the arrays of a step are removed, too."""

    def cut(self, length: int) -> None:
        """Drops what was written after the first `length` bytes, and the arrays of those steps."""
        super().cut(length)
        lines = self.path.read_text(encoding="utf-8").splitlines()
        kept = [f"{FOLDER}/step_{parse_json(line)['step']}.safetensors" for line in lines]
        folder = self.path.with_name(FOLDER)
        for path in folder.iterdir() if folder.is_dir() else ():
            if f"{FOLDER}/{path.name}" not in kept:
                path.unlink()
        self.arrays = {name: checksum(self.path.parent / name) for name in kept}


class ObservationRecorder:
    """Observes a run every `training.observe_every` steps, from step 0 on, and after the last one.

    The main process does it alone: it fetches the samples once and compares the model with its
    initial state, which is drawn again each time. 0 switches it off.
    """

    def start(self, run: LiveRun) -> Sequence[Log]:
        """See `training.task.Recorder`; UserError for a sharded run, for a model whose attention
        or logits cannot be reached, and for too few samples."""
        assert isinstance(run.task.config.training, ObservedLoopConfig)
        self.run, self.settings = run, run.task.config.training
        if not self.settings.observe_every:
            return ()
        if run.is_sharded:
            raise UserError(
                "training.observe_every is not supported with sharding, where no process holds a "
                "whole tensor: set it to 0, or launch without FSDP"
            )
        self.forward = forward_of(run.task)
        check_samples(run.task, self.settings.observe_samples)
        self.log = ObservationLog(run.folder / f"{FOLDER}.jsonl")
        if run.is_main:
            self.batch = eval_batch(run.task, self.settings.observe_samples, run.device)
        return (self.log,)

    def around(self, step: int) -> contextlib.AbstractContextManager:
        """Nothing: an observation needs the state after the step alone."""
        return contextlib.nullcontext()

    def after(self, step: int) -> None:
        """Observes if it is time to; the arrays are on the disk before the line."""
        every = self.settings.observe_every
        if not every or not self.run.is_main:
            return
        if step != self.settings.steps and step % every:
            return
        with self.run.aside():
            found = self.observe()
            path = save_arrays(self.run.folder, step, found.arrays)
            self.log.arrays[f"{FOLDER}/{path.name}"] = checksum(path)
            self.log.append(found.line(step))

    def observe(self) -> Observation:
        """The model as it is now, compared with its initial state."""
        task = self.run.task
        return observe(initial_state(task), current_state(task), self.batch, self.forward)


def save_arrays(run_dir: Path, step: int, arrays: Mapping[str, Tensor]) -> Path:
    """Writes observations/step_N.safetensors whole or not at all."""
    path = run_dir / FOLDER / f"step_{step}.safetensors"
    write_bytes(path, save(dict(arrays)))
    return path
