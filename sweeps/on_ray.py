"""Runs on Ray (`--engine ray`): this machine's, or a cluster's with `--address`.

Nodes may join and leave at any time. Ray finds out that a worker or a node has died; the driver
then submits the run again and it resumes, as the run's folder is its state: all nodes must see the
results folder, and the repository at the same path. A driver that is stopped has its runs save;
one that is killed takes them with it, and each loses what it has done since its last checkpoint
(at most `checkpoint.minutes`).

Clusters that this starts want a token of every client and node (RAY_AUTH_MODE=disabled switches it
off), and nothing is reported to Ray's makers.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sweeps import task
from sweeps.pool import Job, Needs, PoolOptions, stop_seconds, visible_gpus
from training.errors import UserError

CONNECT_SECONDS = 10.0


@dataclass(eq=False)
class _Run:
    """A job in Ray's hands."""

    needs: Needs
    future: Future[dict[str, Any]]
    ref: Any
    group: Any


@dataclass(frozen=True)
class _Place:
    """What a worker takes over from the driver, whose environment Ray's nodes do not have."""

    folder: str
    path: tuple[str, ...]
    environment: dict[str, str]
    threads: int

    def enter(self) -> None:
        """Makes this process, a worker of Ray's, look at files and modules as the driver does."""
        os.chdir(self.folder)
        sys.path[:] = dict.fromkeys([*self.path, *sys.path])
        os.environ.update(self.environment, OMP_NUM_THREADS=str(self.threads))
        if "torch" in sys.modules:  # an earlier run of this worker has read the variable
            sys.modules["torch"].set_num_threads(self.threads)


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith("TRAINING_") or k == "PYTHONPATH"}


class RayPool:
    """Ray places every run on the cores and GPUs, or the share of one, that it needs."""

    def __init__(self, options: PoolOptions) -> None:
        stop_seconds()  # a mistake in it shows before the first run
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        try:
            import ray
        except ImportError:
            raise UserError("--engine ray: Ray is missing; pip install 'ray==2.60.0'") from None
        self.ray, self.options = ray, options
        errors = ray.exceptions
        # What Ray raises when a worker, its node or the head is gone.
        self.lost: tuple[type[BaseException], ...] = (
            errors.WorkerCrashedError, errors.NodeDiedError, errors.LocalRayletDiedError,
            errors.OutOfMemoryError, errors.ObjectLostError, errors.TaskUnschedulableError,
            errors.TaskPlacementGroupRemoved, task.Lost,
        )  # fmt: skip
        self._connect()
        self.runs: set[_Run] = set()
        self.lock = threading.RLock()
        self.stops = 0
        self.deadline: threading.Timer | None = None
        # Ray tells of ended runs on a thread that must not call Ray itself: it would wait for ever.
        self.desk = ThreadPoolExecutor(1)

    def _connect(self) -> None:
        """Joins the cluster at the address, or starts one of this machine's cores and GPUs."""
        address = self.options.address or os.environ.get("RAY_ADDRESS")
        own = {"address": address} if address else {"num_gpus": len(visible_gpus())}
        try:
            host, colon, port = (address or "").rpartition(":")
            if colon and port.isdigit() and "/" not in host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            self.ray.init(**own, log_to_driver=False, logging_level="error")
        except (OSError, RuntimeError, ValueError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            where = address or "this machine"
            raise UserError(f"--engine ray: no Ray at {where}: {line}") from None

    @property
    def slots(self) -> int:
        """Runs in Ray's hands, and one more while the cluster has something free for it."""
        total = self.ray.cluster_resources()
        with self.lock:
            held = [run.needs for run in self.runs]
        if self.options.workers is not None and len(held) >= self.options.workers:
            return len(held)
        free = total.get("CPU", 0) > sum(self._cpus(needs) for needs in held)
        if total.get("GPU"):
            free = free and total["GPU"] > sum(needs.gpus for needs in held)
        return max(1, len(held) + free)

    def submit(self, job: Job, needs: Needs) -> Future[dict[str, Any]]:
        """The run's summary to come; it waits while no node has room for it."""
        cpus = -(-self._cpus(needs) // needs.nodes)
        one: dict[str, float] = {"CPU": cpus}
        if self.ray.cluster_resources().get("GPU"):
            one["GPU"] = needs.gpus / needs.nodes
        self._warn(job, one)
        asked = {"num_cpus": cpus, "num_gpus": one.get("GPU", 0), "max_retries": 0}
        group = None
        if needs.nodes > 1:
            group = self.ray.util.placement_group([one] * needs.nodes, strategy="STRICT_SPREAD")
            asked["scheduling_strategy"] = _part(group, 0)
        threads = job.threads or self.options.threads or cpus
        place = _Place(os.getcwd(), tuple(sys.path), _environment(), threads)
        words = job, needs, self.options.launch, place
        ref = self.ray.remote(_lead).options(**asked).remote(*words, asked, group)
        run = _Run(needs, Future(), ref, group)
        with self.lock:
            self.runs.add(run)
        ref.future().add_done_callback(lambda done: self.desk.submit(self._finish, run, done))
        return run.future

    def stop(self) -> None:
        """Has every run save and end; what is left after stop_seconds(), or now if called again,
        is killed."""
        with self.lock:
            self.stops += 1
            first, runs = self.stops == 1, list(self.runs)
        if first and runs:
            self.deadline = threading.Timer(stop_seconds(), self.stop)
            self.deadline.daemon = True
            self.deadline.start()
        for run in runs:
            self.ray.cancel(run.ref, force=not first)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves the cluster, with which its runs end, and ends one that was started here."""
        with self.lock:
            runs = list(self.runs)
        if cancel_futures:
            for run in runs:
                self.ray.cancel(run.ref)
        for run in runs if wait else ():
            run.future.exception()
        if self.deadline is not None:
            self.deadline.cancel()
        self.ray.shutdown()
        self.desk.shutdown(wait)

    def _cpus(self, needs: Needs) -> int:
        return max(needs.cpus, self.options.threads or 1, needs.nodes)

    def _warn(self, job: Job, one: dict[str, float]) -> None:
        """A run that no node could hold now waits until one joins that can: it is told."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(key, 0) >= n for key, n in one.items()) for node in nodes):
            asked = ", ".join(f"{count:g} {key}" for key, count in one.items())
            print(f"{job.name} waits for a node with {asked}", file=sys.stderr)

    def _finish(self, run: _Run, done: Future[dict[str, Any]]) -> None:
        with self.lock:
            self.runs.discard(run)
        if run.group is not None:
            self.ray.util.remove_placement_group(run.group)
        error = done.exception()
        if error is None:
            task.resolve(run.future, done.result())
        elif isinstance(error, self.ray.exceptions.TaskCancelledError):
            task.resolve(run.future, task.STOPPED)
        else:
            run.future.set_exception(error)


def _part(group: Any, index: int) -> Any:
    """The wish to run in one of the places of a group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _lead(
    job: Job, needs: Needs, launch: Sequence[str], place: _Place, asked: dict[str, Any], group: Any
) -> dict[str, Any]:
    """A run, on its first node; has the other ones start their processes."""
    if needs.nodes == 1:
        return _follow(job, needs, launch, place, task.Node())
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    others = [
        ray.remote(_follow)
        .options(**{**asked, "scheduling_strategy": _part(group, rank)})
        .remote(job, needs, launch, place, task.Node(rank, address, port))
        for rank in range(1, needs.nodes)
    ]
    outcome = _follow(job, needs, launch, place, task.Node(0, address, port))
    try:
        ray.get(others, timeout=stop_seconds())
    except ray.exceptions.RayError as error:
        if outcome.get("error") == "failed":  # as its processes have lost the other ones
            return {"error": "lost", "message": f"a node of the run is gone: {error}"}
    return outcome


def _follow(
    job: Job, needs: Needs, launch: Sequence[str], place: _Place, node: task.Node
) -> dict[str, Any]:
    """A run, or one node's part of it, in a worker of Ray's."""
    place.enter()
    return task.perform(job, needs, launch, node)
