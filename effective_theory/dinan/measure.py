"""What the theory predicts, measured on random networks: means over networks, and their errors.

A Measured holds mean and standard error over the networks of one width (`observation` has the
values of a single one); `limit` extrapolates several widths to infinite width.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import pickle
import signal
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from effective_theory.dinan.config import Config
from effective_theory.dinan.inputs import inputs
from effective_theory.dinan.network import Encoder
from effective_theory.dinan.observation import Directions, Key, Values, observe
from training.errors import UserError

CHUNK = 25  # networks per job and partial sum; fixed, so that sums do not depend on processes


@dataclass
class KernelMeans:
    """Means over networks by name, or their standard errors, float64."""

    G: dict[str, Tensor] = field(default_factory=dict)
    """Preactivations of a block, (1.35): mean of z z over components."""
    F: dict[str, Tensor] = field(default_factory=dict)
    """Signals behind a block's LayerNorm, (1.36)."""
    theta: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Theta^(l), (1.97) and (1.117), by block and tensor; "total" is the sum over tensors.

    A tied word embedding counts as "stem" where it embeds and "readout" where it is the head.
    Their cross term is exactly 0 for outputs that no input has, the ones measured.
    """
    groups: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """theta's tensors summed by group over the blocks before, by block and group."""
    diagonals: dict[Key, Tensor] = field(default_factory=dict)
    """Mean over the diagonal of the kernel at ("G", block), ("F", block) or ("theta", block, name),
    name a group or "total". The error is that of the networks' own means."""
    rests: dict[Key, Tensor] = field(default_factory=dict)
    """At the same keys: the off-diagonal entries along a direction given to `measure`."""
    off_diagonal: dict[str, Tensor] = field(default_factory=dict)
    """The same total between two different components, 0 on average by (1.117)."""
    magnitudes: dict[str, Tensor] = field(default_factory=dict)
    """|g| of a tensor: root mean square of dz^(L)/d theta over its parameters, a number.

    Mean over samples, tokens and networks is taken of the square. For words, the n entries of one
    row are counted, as the paper does.
    """


@dataclass(frozen=True)
class Measured:
    """Mean and standard error over the networks of one width."""

    width: int
    seeds: tuple[int, ...]
    averages: Values
    squares: Values
    """Summed squared deviations from the average."""

    @property
    def count(self) -> int:
        """Networks."""
        return len(self.seeds)

    @property
    def mean(self) -> KernelMeans:
        """Means over networks."""
        return _named(
            {
                key: value.sqrt() if key[0] == "magnitudes" else value
                for key, value in self.averages.items()
            }
        )

    @property
    def se(self) -> KernelMeans:
        """Standard errors of the means; NaN for a single network."""
        errors = _standard_errors(self)
        for key in errors:
            if key[0] == "magnitudes":
                root = self.averages[key].sqrt()
                errors[key] = torch.where(root > 0, errors[key] / (2 * root), errors[key])
        return _named(errors)


class Limit(NamedTuple):
    """Values at infinite width with standard errors, see `limit`."""

    mean: KernelMeans
    se: KernelMeans


class Extrapolated(NamedTuple):
    """The constant of a fit and its standard error, entry by entry."""

    value: Tensor
    se: Tensor


def network(config: Config, width: int, seed: int, encoder: Encoder | None = None) -> Encoder:
    """The network of a seed, without parameter gradients; draws into `encoder` if there is one.

    Networks of one seed at two widths share no random numbers.
    """
    encoder = Encoder(config, width).requires_grad_(False) if encoder is None else encoder
    # torch's generator keeps 32 bits of its seed, so the width cannot go into higher ones
    generator = torch.Generator().manual_seed(zlib.crc32(f"{width} {seed}".encode()))
    return encoder.initialise(generator)


def measure(
    config: Config,
    width: int,
    seeds: Iterable[int],
    x: Tensor,
    directions: Directions | None = None,
) -> Measured:
    """Observes the networks of these seeds one by one, on inputs x of `inputs`.

    `directions` are matrices with zero diagonal, by the keys of `KernelMeans.diagonals`; the sums
    of products with them are `KernelMeans.rests`, with the error of the networks' own sums.
    """
    seeds = tuple(seeds)
    if not seeds:
        raise ValueError("measure needs at least one seed")
    encoder = Encoder(config, width).requires_grad_(False)
    parts = []
    for start in range(0, len(seeds), CHUNK):
        chunk = seeds[start : start + CHUNK]
        observed = [
            observe(network(config, width, seed, encoder), x, directions or {}) for seed in chunk
        ]
        parts.append(_statistics(width, chunk, observed))
    return combine(parts)


def measure_widths(
    config: Config,
    processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
    directions: Directions | None = None,
) -> list[Measured]:
    """Every width of config.measure with its networks, seeds 0, 1, ..., on the config's inputs.

    Several processes have one thread each and give the same result as one, which is this one.
    `progress` is called with the networks done and their total. Ctrl-C ends all processes.
    UserError if a process is killed, and for what cannot be measured as configured.
    """
    config.check_measurement()
    jobs = [  # width and seeds, the longest first
        (width, range(start, min(start + CHUNK, seeds)))
        for width, seeds in zip(config.measure.widths, config.measure.seeds, strict=True)
        for start in range(0, seeds, CHUNK)
    ]
    jobs.sort(key=lambda job: (-(job[0] ** 2) * len(job[1]), job[1].start))
    total = sum(len(seeds) for _, seeds in jobs)
    parts: dict[tuple[int, range], Measured] = {}
    with contextlib.closing(_run_jobs(config, jobs, processes, directions or {})) as results:
        for job, part in results:
            parts[job] = part
            if progress is not None:
                progress(sum(len(seeds) for _, seeds in parts), total)
    return [
        combine([parts[job] for job in jobs if job[0] == width]) for width in config.measure.widths
    ]


def combine(parts: Sequence[Measured]) -> Measured:
    """One result from several at one width; ValueError if they share a seed."""
    return functools.reduce(_combine_two, parts)


def extrapolate(
    widths: Sequence[int], means: Sequence[Tensor], ses: Sequence[Tensor]
) -> Extrapolated:
    """Weighted least squares of mean = a + b / n, entry by entry: a.

    At a fixed number of heads the corrections in H / n are of this form too. The standard error is
    the one that the given errors imply. Entries that are exactly known at every width weigh
    equally. UserError for fewer than 2 widths.
    """
    if len(widths) < 2:
        raise UserError(
            f"measure.widths has {len(widths)} of the 2 widths that an extrapolation in 1/n needs; "
            "measure more widths"
        )
    ratio = min(widths) / torch.tensor(list(widths), dtype=torch.float64)
    terms = torch.stack([torch.ones_like(ratio), ratio], -1)  # (widths, 2)
    y = torch.stack([mean.double() for mean in means], -1)  # (..., widths)
    errors = torch.stack([se.double() for se in ses], -1)
    floor = 1e-9 * y.abs().amax(-1, keepdim=True).clamp_min(1e-200)
    errors = errors.maximum(floor)
    least = errors.amin(-1, keepdim=True)
    weights = (least / errors) ** 2
    normal = torch.einsum("...w,wi,wj->...ij", weights, terms, terms)
    first = torch.linalg.inv_ex(normal).inverse[..., 0, :]
    value = (first * ((weights * y) @ terms)).sum(-1)
    return Extrapolated(value, first[..., 0].sqrt() * least[..., 0])


def limit(measured: Sequence[Measured], s: float = 0.0) -> Limit:
    """`extrapolate` of everything that has a limit; see there for errors.

    Gradients have none worth the name: they go as powers of the width. At s > 0 the head's kernel
    falls as n^-s and the tangent kernels before the head rise as n^s.
    """
    widths = [part.width for part in measured]
    errors = [_standard_errors(part) for part in measured]
    means, ses = {}, {}
    for key in measured[0].averages:
        if _has_limit(key, s):
            values = [part.averages[key] for part in measured]
            means[key], ses[key] = extrapolate(widths, values, [se[key] for se in errors])
    return Limit(_named(means), _named(ses))


def _has_limit(key: Key, s: float) -> bool:
    """Whether a kernel is of order one at every width."""
    kind, *names = key
    if kind in ("diagonals", "rests"):
        kind, *names = names
    head = names[0] == "head"
    tangents = kind in ("theta", "groups", "off_diagonal")
    return kind != "magnitudes" and (s == 0 or tangents == head or kind == "F")


def _statistics(width: int, seeds: tuple[int, ...], observed: list[Values]) -> Measured:
    averages, squares = {}, {}
    for key in observed[0]:
        values = torch.stack([values[key] for values in observed])
        averages[key] = values.mean(0)
        squares[key] = ((values - averages[key]) ** 2).sum(0)
    return Measured(width, seeds, averages, squares)


def _combine_two(one: Measured, other: Measured) -> Measured:
    """Means and squares of both together (Chan, Golub & LeVeque)."""
    if one.width != other.width or set(one.seeds) & set(other.seeds):
        raise ValueError("results to combine must be of one width and share no seed")
    count = one.count + other.count
    averages, squares = {}, {}
    for key, average in one.averages.items():
        difference = other.averages[key] - average
        averages[key] = average + difference * other.count / count
        between = difference**2 * one.count * other.count / count
        squares[key] = one.squares[key] + other.squares[key] + between
    return Measured(one.width, one.seeds + other.seeds, averages, squares)


def _standard_errors(measured: Measured) -> Values:
    count = measured.count
    divisor = count * (count - 1) or math.nan
    return {key: (square / divisor).sqrt() for key, square in measured.squares.items()}


def _named(values: Values) -> KernelMeans:
    kernels = KernelMeans()
    for (kind, *names), value in values.items():
        target = getattr(kernels, kind)
        path: list[Any] = [tuple(names)] if kind in ("diagonals", "rests") else names
        for name in path[:-1]:
            target = target.setdefault(name, {})
        target[path[-1]] = value
    return kernels


def _run_jobs(
    config: Config, jobs: list[tuple[int, range]], processes: int, directions: Directions
) -> Generator[tuple[tuple[int, range], Measured], None, None]:
    """Jobs with their results as they come."""
    x = inputs(config)
    if processes == 1:
        yield from ((job, measure(config, *job, x, directions)) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(processes, len(jobs)), spawn, _prepare_process) as pool:
            pickled = pickle.dumps((x, directions))
            futures = {pool.submit(_job, config, *job, pickled): job for job in jobs}
            try:
                for future in as_completed(futures):
                    yield futures[future], pickle.loads(future.result())
            except BaseException:  # ends the processes at once, their jobs unfinished
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
    except BrokenProcessPool:
        raise UserError(
            "a process of the measurement was killed, often for want of memory; use fewer "
            "processes or lower measure.widths"
        ) from None


def _prepare_process() -> None:
    """Ctrl-C is for the process that waits for the results; the others end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _job(config: Config, width: int, seeds: range, inputs: bytes) -> bytes:
    """`measure` with pickles in place of tensors, which would be sent as shared memory."""
    x, directions = pickle.loads(inputs)
    return pickle.dumps(measure(config, width, seeds, x, directions))
