"""A toy experiment for tests of sweeps: runs that are as slow and as faulty as asked."""

import json
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sweeps.pool import Job, PoolOptions, open_pool

ROOT = Path(__file__).resolve().parents[2]

# Seeds with which a run does not end well.
FAILS, DIES, REFUSES, WRONG_FOLDER, SECOND_FAILS = range(13, 18)
HOLD, DEAF = 60, 100  # seconds of a step: until it is told to stop or to go on; whatever it is told

# Each run notes its name when it begins to train, and its process with what that may use.
TRAIN = (
    f"FAILS, DIES, REFUSES, WRONG_FOLDER, SECOND_FAILS = range({FAILS}, {FAILS + 5})"
    + '''
import json, os, random, shutil, signal, socket, sys, time
from training import runs
from training.config import to_yaml
from training.errors import RunError, UserError
from training.experiment import Experiment
from training.files import locked, write_json, write_text
from training.log import Log
from training.settings import RunConfig
from training.signals import StopRequest

class Counting(Experiment):
    """Counts its steps in place of training, without torch: a process starts in tenths of a second.
    It saves, stops and resumes as the loop does."""

    def flops(self, config):
        return config.optimizer.lr

    def run(self, config, run_dir, progress=None):
        print("loading the data", flush=True)
        rank = os.environ.get("RANK", "0")
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NODES")
        told = {name: os.environ.get(name) for name in names}
        write_json(run_dir / f"at-{rank}", {"pid": os.getpid(), **told})
        if config.seed == FAILS or config.seed == SECOND_FAILS and rank == "1":
            raise RuntimeError("no such thing")
        if config.seed == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        if config.seed == REFUSES:
            self.refuse(run_dir)
        if config.seed == WRONG_FOLDER:
            raise RunError(f"{run_dir}: holds something else")
        return self.work(config, run_dir, progress)

    def work(self, config, run_dir, progress):
        with locked(run_dir, "run"), StopRequest() as stop:
            return runs.done(run_dir) or self.count(config, run_dir, progress, stop)

    def count(self, config, run_dir, progress, stop):
        begins(run_dir)
        write_text(run_dir / "config.yaml", to_yaml(config))
        saved, steps = sorted(run_dir.glob("checkpoints/*/meta.json")), config.training.steps
        now = {"step": 0, "loss": 4.0, "resumed_from": []}
        if saved:
            now = json.loads(saved[-1].read_text())
            now["resumed_from"].append(now["step"])
        first = now["step"] + 1
        for step in range(first, steps + 1):
            if step > first:
                slowly(run_dir)
            stopping = self.agreed(stop.requested)
            drawn = random.Random(f"{config.seed} {step}").random()
            now.update(step=step, loss=now["loss"] * (1 - config.optimizer.lr) + 0.01 * drawn)
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps({"step": step, "train_loss": now["loss"]}) + "\\n")
            if progress:
                progress(step, steps, now["loss"])
            if config.checkpoint.every or stopping:
                folder = run_dir / f"checkpoints/step-{step:08d}"
                folder.mkdir(parents=True, exist_ok=True)  # it may have died right here
                write_json(folder / "meta.json", now)
            if stopping:
                break
        status = "finished" if now["step"] == steps else "stopped"
        summary = {"status": status, "steps": steps, "final_eval_loss": now["loss"],
                   "best_eval_loss": now["loss"], "first_train_loss": 4.0, **now}
        log = Log(run_dir / "metrics.jsonl")
        log.cut(log.path.stat().st_size)
        runs.write_summary(run_dir, run_dir.name, summary, [log])
        if status == "finished":
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        return summary

    def agreed(self, stopping):
        return stopping

    def refuse(self, run_dir):
        raise UserError("corpus.txt: no such file")

class Pair(Counting):
    """A run of two processes: the first one counts, and at every step they agree whether to stop.
    They meet at PAIR, or where the first one listens, which is in a file until they have met."""

    def work(self, config, run_dir, progress):
        place = run_dir / "place"
        if os.environ["RANK"] == "0":
            with socket.create_server(address(os.environ.get("PAIR", "127.0.0.1:0"))) as server:
                write_text(place, "{}:{}".format(*server.getsockname()))
                server.settimeout(300)
                self.other = server.accept()[0]
            place.unlink()
            with self.other:
                summary = super().work(config, run_dir, progress)
                self.other.send(b"e")
            return summary
        with StopRequest() as stop, meet(place) as first:
            while (word := first.recv(1)) == b"s":
                first.send(bytes([stop.requested]))
        if not word:
            raise RuntimeError("the first process is gone")
        return {}

    def agreed(self, stopping):
        self.other.send(b"s")
        word = self.other.recv(1)
        if not word:
            raise RuntimeError("the second process is gone")
        return stopping or word == bytes([True])

    def refuse(self, run_dir):
        if os.environ["RANK"] != "0":  # as processes.on_main
            while not (run_dir / "refused").exists():
                time.sleep(0.02)
            raise SystemExit(2)
        while not (run_dir / "at-1").exists():  # or it might be ended before it has begun
            time.sleep(0.02)
        (run_dir / "refused").touch()
        super().refuse(run_dir)

def address(text):
    host, _, port = text.rpartition(":")
    return host, int(port)

def meet(place):
    end = time.monotonic() + 300
    while True:
        try:
            return socket.create_connection(address(os.environ.get("PAIR") or place.read_text()))
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)

class Place(Counting):
    """Holds its place until its folder has a file `go`."""

    def work(self, config, run_dir, progress):
        while not (run_dir / "go").exists():
            time.sleep(0.02)
        return {"status": "finished"}

class Training(Counting):
    """A real run of the loop."""

    def work(self, config, run_dir, progress):
        import toy_run
        from training import loop

        task = toy_run.build_task(config)
        count, batches = task.count, []

        def paused(batch):
            batches.append(batch)
            if len(batches) > 1:
                slowly(run_dir)
            return count(batch)

        def train():
            if os.environ.get("RANK", "0") == "0":
                begins(run_dir)
            return loop.train(task, run_dir, progress)

        task.count = paused
        return runs.train_once(run_dir, config, task.plan, train)

def begins(run_dir):
    with open(run_dir.parent / "calls.txt", "a") as file:
        file.write(f"{time.time()} {run_dir.name}\\n")

def slowly(run_dir):
    """Waits as long as the file `pause` says, looking at it all the time; a run that is asked to
    stop waits no longer, unless it is to be deaf."""
    (run_dir / "training").touch()
    file, begun = run_dir.parents[3] / "pause", time.monotonic()
    while True:
        seconds = float(file.read_text()) if file.exists() else 0.0
        asked = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if asked is not None and asked.requested and seconds < DEAF:
            return
        if time.monotonic() - begun >= seconds:
            return
        time.sleep(0.02)

def made(kind):
    return kind(
        name=__name__.partition(".")[0], description="toy", config=RunConfig, build_task=print,
        build_plan=print, products=print, tokens_per_step=lambda config: 24, result=str,
    )

EXPERIMENT = made(Counting)
# Of sweeps.task, where it has started a process of a run.
sys.modules["__main__"].FIRST_SECONDS = 2
'''
    + f"DEAF = {DEAF}\n"
)


@pytest.fixture(scope="session")
def ray_settings():
    """A token for all clusters of this process: Ray reads it once, when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")  # else 16 on every node
        yield


class RayCluster:
    """Two nodes on this machine, with pretended cores and GPUs."""

    NODE = {"num_cpus": 16, "num_gpus": 8}

    def __init__(self):
        from ray.cluster_utils import Cluster

        self.cluster = Cluster()
        try:
            # Nobody reads what the monitors tell.
            self.add_node(include_dashboard=False, include_log_monitor=False, no_monitor=True)
            self.second = self.add_node()
        except BaseException:
            self.cluster.shutdown()
            raise

    @property
    def address(self):
        return self.cluster.address

    def add_node(self, **options):
        """A node; a machine that is busy with other tests may need a second attempt."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH"):  # a test has set them
                patch.delenv(name, raising=False)
            try:
                return self.cluster.add_node(**self.NODE, **options)
            except Exception:
                return self.cluster.add_node(**self.NODE, **options)

    def kill_node(self):
        """Kills the second node with its runs, and has another one join."""
        raylet = self.second.all_processes["raylet"][0].process.pid
        found = subprocess.run(["pgrep", "-P", str(raylet)], capture_output=True, text=True)
        for pid in (raylet, *map(int, found.stdout.split())):
            os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = self.add_node()


@pytest.fixture(scope="session")
def ray_cluster(ray_settings):
    """One cluster for all tests with Ray; their mark, xdist_group, keeps them in one process."""
    cluster = RayCluster()
    yield cluster
    cluster.cluster.shutdown()


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The name of an experiment's package in tmp_path, which every process finds."""
    name = "toy_" + tmp_path.name.replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(TRAIN)
    for part, text in (("real", REAL), ("pair", PAIR), ("place", PLACE)):
        (package / part).mkdir()
        (package / part / "__init__.py").write_text("")
        (package / part / "train.py").write_text(text)
    places = [ROOT, tmp_path, ROOT / "tests" / "training"]
    for place in places[1:]:
        monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return name


@pytest.fixture
def pause(tmp_path):
    """Says how long a step takes from now on, wherever runs of the toy are at work."""

    def pause(seconds):
        (tmp_path / "pause.new").write_text(str(seconds))
        (tmp_path / "pause.new").rename(tmp_path / "pause")

    return pause


@pytest.fixture
def job(toy, tmp_path):
    """Makes a run of the toy, or of a part of its package, saved at every step."""

    def make(name, seed=0, part=None, threads=None):
        experiment = f"{toy}.{part}" if part else toy
        config = {"optimizer": {"lr": 0.05}, "schedule": {}, "checkpoint": {"every": 1}}
        config |= {"training": {"steps": 30, "batch_size": 4, "log_every": 1}, "seed": seed}
        return Job(name, experiment, config, tmp_path / "results" / toy / "s" / name, threads)

    return make


@pytest.fixture
def open_engine():
    """Opens pools; runs that are left in them end with the test."""
    made = []

    def open_it(engine, **options):
        made.append(open_pool(engine, PoolOptions(**options)))
        return made[-1]

    yield open_it
    for pool in made:
        pool.stop()
        pool.stop()
        pool.shutdown()


REAL = "from ..train import Training, made\n\nEXPERIMENT = made(Training)\n"
PAIR = REAL.replace("Training", "Pair")

PLACE = REAL.replace("Training", "Place")


def wait_until(condition, seconds=300):
    """Waits for an event, which comes at once unless the machine is busy."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def at(run, rank=0):
    wait_until(lambda: (run.run_dir / f"at-{rank}").exists())
    return json.loads((run.run_dir / f"at-{rank}").read_text())


def saved(run):
    return [path.parent.name for path in run.run_dir.glob("checkpoints/step-*/meta.json")]
