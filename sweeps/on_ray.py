"""Runs on Ray (`--engine ray`): this machine's, or a cluster's with `--address`.

Nodes may join and leave at any time. The driver resubmits a run whose worker or node has died, and
the run resumes: all nodes see the results folder and the repository at the same paths. A driver
that is stopped lets its runs save; a driver that is killed takes its runs with it.

A cluster that is started here requires a token from every client and node (RAY_AUTH_MODE=disabled
turns this off). Ray's usage statistics are off.
"""

import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from logging import ERROR
from pathlib import Path
from typing import Any

from sweeps import task
from sweeps.pool import Job, Needs, Pool, PoolOptions, stop_seconds, visible_gpus
from sweeps.progress import say
from training.errors import UserError
from training.runs import Summary

CONNECT_SECONDS = 10.0
DIED = "--engine ray: Ray {} has died, and its runs with it; the same command resumes them"


@dataclass(eq=False)
class _Held:
    """A run in Ray's hands, and what Ray sets aside for it: cores and GPUs on each of its nodes."""

    ref: Any
    group: Any
    share: Mapping[str, float]
    nodes: int
    future: Future[Summary] = field(default_factory=Future)


class RayPool(Pool):
    """Ray places every run on the cores and GPUs that it needs."""

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        self.address = options.address or os.environ.get("RAY_ADDRESS")
        if not self.address:
            # The token of our own cluster is in no file; Ray would make one that all may read.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        elif "RAY_AUTH_TOKEN" not in os.environ:
            token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
            if token.exists() and token.stat().st_mode & 0o077:
                raise UserError(
                    f"--engine ray: {token}: others may read it, and run code as you with it; "
                    f"chmod 600 {token}"
                )
        import ray  # seconds

        self.ray, errors = ray, ray.exceptions
        # What Ray raises when a worker, its node or the head is gone.
        self.lost = (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.LocalRayletDiedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
            errors.TaskUnschedulableError,
            errors.TaskPlacementGroupRemoved,
            task.Lost,
        )
        try:
            host, colon, port = (self.address or "").rpartition(":")
            if colon and port.isdigit() and "/" not in host:  # Ray itself would try for minutes
                socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
            gpus = None if self.address else len(visible_gpus())
            # Without an address Ray would join any cluster that it finds on this machine.
            ray.init(
                self.address or "local", num_gpus=gpus, log_to_driver=False, logging_level=ERROR
            )
        except (OSError, RuntimeError, ValueError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            where = self.address or "this machine"
            raise UserError(f"--engine ray: no Ray at {where}: {line}") from None
        # Through ray:// the head itself may be out of reach; Ray's client says when it is lost.
        client = "://" in (self.address or "")
        self.head = None if client else ray.get_runtime_context().gcs_address.rsplit(":", 1)
        # Ray's callbacks for ended runs are on a thread that would deadlock if it called Ray.
        self.desk = ThreadPoolExecutor(1)

    @property
    def slots(self) -> int:
        """Runs in Ray's hands, and one more while the cluster has something free for it.

        UserError, also for the runs, once the head or a cluster that was started here has died:
        Ray itself says nothing of the runs that it has lost, and after a minute ends this process.
        """
        try:
            if self.head:
                socket.create_connection(self.head, CONNECT_SECONDS).close()
            total = self.ray.cluster_resources()
            died = not (total or self.address)
        except OSError:
            died = True
        with self.lock:
            held = list(self.held)
            if died:
                self.held.clear()
                error = UserError(
                    DIED.format(f"at {self.address}" if self.address else "on this machine")
                )
                for run in held:
                    run.future.set_exception(error)
                raise error
        full = self.options.workers is not None and len(held) >= self.options.workers
        for name in ("CPU", "GPU"):
            taken = sum(run.share.get(name, 0) * run.nodes for run in held)
            full = full or ((name == "CPU" or name in total) and taken >= total.get(name, 0))
        return max(1, len(held) + (not full))

    def submit(self, job: Job, needs: Needs) -> Future[Summary]:
        """The run's summary to come; it waits while no node has room for it."""
        total, workers = self.ray.cluster_resources(), self.options.workers or 0
        launched = task.processes_of_all(self.options.launch)
        if needs == Needs():  # a GPU for each process that the launch command of all runs starts
            needs = Needs(gpus=launched)
        processes = max(needs.processes, launched)
        cpus = -(-max(processes, self.options.threads or 1) // needs.nodes)
        share: dict[str, float] = {"CPU": cpus}  # every process needs a core
        if gpus := total.get("GPU"):
            # With more workers than GPUs, several runs share each GPU.
            shared = needs.gpus == 1 and workers > gpus
            share["GPU"] = 1 / -(-workers // gpus) if shared else needs.gpus / needs.nodes
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(key, 0) >= n for key, n in share.items()) for node in nodes):
            wish = ", ".join(f"{count:g} {key}" for key, count in share.items())
            say(f"{job.name} waits for a node with {wish}")
        options = {"num_cpus": cpus, "num_gpus": share.get("GPU", 0), "max_retries": 0}
        group = None
        if needs.nodes > 1:
            group = self.ray.util.placement_group([share] * needs.nodes, strategy="STRICT_SPREAD")
            options["scheduling_strategy"] = _part(group, 0)
        share_of_cores = max(1, cpus // max(1, processes // needs.nodes))
        threads = job.threads or self.options.threads or share_of_cores
        environment = {
            key: value
            for key, value in os.environ.items()
            if key.startswith("TRAINING_") or key == "PYTHONPATH"
        }
        words = replace(job, threads=threads), needs, self.options.launch
        here = os.getcwd(), tuple(sys.path), environment
        ref = self.ray.remote(_lead).options(**options).remote(words, here, options, group)
        run = _Held(ref, group, share, needs.nodes)
        with self.lock:
            self.held.append(run)
        ref.future().add_done_callback(partial(self._tell, run))
        return run.future

    def _stop(self, at_once: bool) -> None:
        for run in self.held:
            self.ray.cancel(run.ref, force=at_once)

    def _close(self, wait: bool) -> None:
        """Leaves the cluster, with which its runs end, and ends one that was started here."""
        # Ray ends this process, without a word, if another thread lets go of a run meanwhile.
        self.desk.shutdown()
        self.ray.shutdown()

    def _tell(self, run: _Held, done: Future[task.Outcome]) -> None:
        with suppress(RuntimeError):  # of a desk that is closed: nobody waits for the run any more
            self.desk.submit(self._finish, run, done)

    def _finish(self, run: _Held, done: Future[task.Outcome]) -> None:
        with self.lock:
            if run not in self.held:
                return
            self.held.remove(run)
        if run.group is not None:
            self.ray.util.remove_placement_group(run.group)
        error, errors = done.exception(), self.ray.exceptions
        stopped = isinstance(error, errors.TaskCancelledError)
        if self.stops:  # an interruption of what a worker imports may end in any error
            stopped = stopped or isinstance(error, errors.RayTaskError)
        elif isinstance(error, errors.LocalRayletDiedError) and not self.address:
            error = UserError(DIED)
        if error is None or stopped:
            task.resolve(run.future, task.STOPPED if error else done.result())
        else:
            run.future.set_exception(error)


def _part(group: Any, index: int) -> Any:
    """The scheduling strategy for one bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


_Words = tuple[Job, Needs, Sequence[str]]
_Surroundings = tuple[str, Sequence[str], Mapping[str, str]]


def _lead(words: _Words, here: _Surroundings, options: dict[str, Any], group: Any) -> task.Outcome:
    """A run, on its first node; has the other ones start their processes."""
    nodes = words[1].nodes
    if nodes == 1:
        return _follow(words, here, task.Node())
    import ray

    address = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    others = [
        ray.remote(_follow)
        .options(**{**options, "scheduling_strategy": _part(group, rank)})
        .remote(words, here, task.Node(rank, address, port))
        for rank in range(1, nodes)
    ]
    outcome = _follow(words, here, task.Node(0, address, port))
    try:
        ray.get(others, timeout=stop_seconds())
    except ray.exceptions.RayError as error:
        if outcome.get("error") == "failed":  # as its processes have lost the other ones
            return {"error": "lost", "message": f"a node of the run is gone: {error}"}
    return outcome


def _follow(words: _Words, here: _Surroundings, node: task.Node) -> task.Outcome:
    """A run, or one node's part of it, in a Ray worker. The worker takes over the driver's folder,
    module path and environment variables, which Ray does not pass on."""
    folder, path, environment = here
    os.chdir(folder)
    sys.path[:] = dict.fromkeys([*path, *sys.path])
    os.environ.update(environment)
    return task.perform(*words, node)
