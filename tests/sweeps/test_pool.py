"""The engine of this machine: where runs are placed, what their futures hold, how they stop."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from sweeps import pool as pools
from sweeps import task
from sweeps.pool import Needs, RunFailed
from tests.processes import gone
from tests.sweeps.conftest import (
    DEAF,
    DIES,
    FAILS,
    HOLD,
    REFUSES,
    ROOT,
    SECOND_FAILS,
    WRONG_FOLDER,
    at,
    saved,
    wait_until,
)
from training.errors import RunError, UserError
from training.files import Busy, locked

TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
FORKED = (sys.executable, str(ROOT / "tests/sweeps/forked.py"))
SEVERAL = (*FORKED, "{processes}")  # for runs that need several processes; the others start all
PAIR = Needs(processes=2)
LAUNCHED = ("env", "RANK=0", sys.executable)


@pytest.fixture
def opened(open_engine):
    return partial(open_engine, "local")


def started(run, rank=0):
    return (run.run_dir / f"at-{rank}").exists()


def steps(run):
    path = run.run_dir / "metrics.jsonl"
    return path.read_text().count("train_loss") if path.exists() else 0


def test_a_future_holds_the_summary_or_what_went_wrong(opened, job, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "1")  # which --threads overrides, in the first run, too
    pool = opened(workers=1, threads=3)
    fine, second = job("fine", part="real"), job("second", seed=1, part="real")
    assert pool.slots == 1
    results = [pool.submit(run, Needs()).result(300) for run in (fine, second)]
    assert [result["status"] for result in results] == ["finished"] * 2 and not saved(fine)
    assert [result["environment"]["threads"] for result in results] == [3, 3]
    assert at(fine)["pid"] == at(second)["pid"] != os.getpid()  # torch is imported once
    assert at(fine)["OMP_NUM_THREADS"] == "3"
    assert pool.submit(fine, Needs()).result(300) == results[0]  # not trained again
    log = (fine.run_dir / "log.txt").read_text()
    assert log.count("loading the data") == 2 and "readout.weight" in log

    with pytest.raises(RunFailed, match="RuntimeError: no such thing; the end of") as failure:
        pool.submit(job("fails", FAILS), Needs()).result(300)
    assert 'raise RuntimeError("no such thing")' in failure.value.tail in str(failure.value)
    with pytest.raises(UserError, match="^corpus.txt: no such file$"):
        pool.submit(job("refuses", REFUSES), Needs()).result(300)
    with pytest.raises(RunError, match="holds something else"):
        pool.submit(job("wrong", WRONG_FOLDER), Needs()).result(300)
    with pytest.raises(RunError, match="another config"):
        pool.submit(job("fine", seed=2, part="real"), Needs()).result(300)
    third = job("third", seed=3)
    with locked(third.run_dir, "run"), pytest.raises(Busy, match="another process"):
        pool.submit(third, Needs()).result(300)
    assert at(third)["pid"] == at(fine)["pid"]


def test_a_worker_that_dies_costs_its_own_run_only(opened, job):
    pool = opened(workers=2, threads=1)
    dead, fine = job("dead", DIES), job("fine")
    futures = [pool.submit(dead, Needs()), pool.submit(fine, Needs())]
    with pytest.raises(pool.lost, match="ended with code -9; the end of") as end:
        futures[0].result(300)
    assert "loading the data" in str(end.value)
    assert futures[1].result(300)["resumed_from"] == []
    again = job("again", seed=1)  # in a fresh process, or in the one that lives
    os.kill(at(fine)["pid"], signal.SIGKILL)  # while it has nothing to do
    wait_until(lambda: gone(at(fine)["pid"]))
    future = pool.submit(again, Needs())
    try:
        assert future.result(300)["status"] == "finished"
    except pool.lost:  # the pool had not yet noticed
        assert pool.submit(again, Needs()).result(300)["status"] == "finished"


@pytest.mark.parametrize("python", ["dies", "is gone"])
def test_workers_that_die_as_they_start_are_one_line_and_an_end(
    opened, job, tmp_path, monkeypatch, python
):
    """As after a rebuilt environment: no run is given up for it."""
    broken = tmp_path / "python"
    if python == "dies":
        broken.write_text("#!/bin/sh\nexit 3\n")
        broken.chmod(0o755)
    pool = opened(workers=1, threads=1)
    first = job("first")
    assert pool.submit(first, Needs()).result(300)["status"] == "finished"
    monkeypatch.setattr("multiprocessing.spawn._python_exe", str(broken).encode())
    os.kill(at(first)["pid"], signal.SIGKILL)
    wait_until(lambda: gone(at(first)["pid"]))
    errors = []
    while not errors or isinstance(errors[-1], pool.lost):
        errors.append(pool.submit(job("next"), Needs()).exception(300))
    assert 3 <= len(errors) <= 4 and isinstance(errors[-1], UserError)
    assert "the last 3 processes of" in str(errors[-1]) and "died as they start" in str(errors[-1])
    assert not job("next").run_dir.exists()


@pytest.mark.parametrize("count", range(4))
def test_threads_that_cannot_start_are_one_line_and_an_end(opened, job, monkeypatch, count):
    """The pool's own, its executor's, that one's own, and the clock of a stop."""
    left, start = [count], threading._start_new_thread

    def start_while_any_are_left(*words):
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return start(*words)

    monkeypatch.setattr("threading._start_new_thread", start_while_any_are_left)
    if not count:
        with pytest.raises(UserError, match="no further thread can be started"):
            opened(workers=1, threads=1)
        return
    pool = opened(workers=1, threads=1)
    future = pool.submit(job("run"), Needs())
    if count < 3:
        with pytest.raises(UserError, match="no further thread can be started"):
            future.result(60)
    pool.stop()
    if count == 3:
        assert future.result(60) == {"status": "stopped"}
    pool.shutdown()
    assert not multiprocessing.active_children()


def test_stopped_runs_save_and_go_on_and_waiting_ones_do_not_start(opened, job, pause):
    pause(HOLD)
    pool = opened(workers=1, threads=1)
    running, waiting = job("running"), job("waiting", seed=1)
    futures = [pool.submit(running, Needs()), pool.submit(waiting, Needs())]
    wait_until(lambda: saved(running))
    pool.stop()
    assert [future.result(300)["status"] for future in futures] == ["stopped", "stopped"]
    assert len(saved(running)) >= 1 and not waiting.run_dir.exists()
    pool.shutdown()
    wait_until(lambda: gone(at(running)["pid"]))
    pause(0)
    summary = opened(workers=1).submit(running, Needs()).result(300)
    assert summary["status"] == "finished" and len(summary["resumed_from"]) == 1


def test_a_run_that_does_not_train_yet_is_stopped_too(opened, job):
    pool = opened(workers=1)
    run = job("run", part="place")
    future = pool.submit(run, Needs())
    pool.stop()  # while its process starts
    assert future.result(300) == {"status": "stopped"}
    pool = opened(workers=1)
    future = pool.submit(run, Needs())
    wait_until(lambda: started(run))
    pool.stop()
    assert future.result(300) == {"status": "stopped"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("error", [None, ValueError], ids=["interrupted", "an error in its place"])
def test_a_stop_while_modules_are_imported_is_a_stop_whatever_they_make_of_it(
    job, monkeypatch, number, error
):
    """Pydantic, compiled, turns an interruption into its SchemaError."""

    def load(name):
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise (error or KeyboardInterrupt) from None

    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr("training.experiment.load_experiment", load)
    assert task.perform(job("run"), Needs()) == {"summary": {"status": "stopped"}}
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.parametrize("way", ["called again", "out of time"])
def test_what_does_not_stop_is_killed(opened, job, monkeypatch, pause, way):
    pause(DEAF)
    monkeypatch.setenv("TRAINING_STOP_SECONDS", "0.5" if way == "out of time" else "100")
    pool = opened(workers=1, threads=1)
    run = job("run")
    future = pool.submit(run, Needs())
    wait_until(lambda: (run.run_dir / "training").exists())
    pool.stop()
    if way == "called again":
        pool.stop()
    with pytest.raises(pool.lost):
        future.result(300)
    wait_until(lambda: gone(at(run)["pid"]))


DRIVER = """
import sys
from pathlib import Path
from sweeps.pool import Job, Needs, PoolOptions, open_pool
if __name__ == "__main__":
    names, experiment, folder, launch = *sys.argv[1:3], Path(sys.argv[3]), sys.argv[4:]
    pool = open_pool("local", PoolOptions(workers=2, threads=1, launch=tuple(launch)))
    jobs = [Job(n, experiment, {**CONFIG, "seed": s}, folder / n) for s, n in enumerate(names)]
    futures = [pool.submit(job, Needs()) for job in jobs]
    assert "torch" not in sys.modules
    print([future.result()["status"] for future in futures])
"""


@pytest.mark.parametrize(
    ("names", "part", "launch"),
    [("ab", None, ()), ("a", "pair", TWO)],
    ids=["one process", "two processes"],
)
def test_a_killed_driver_leaves_checkpoints_and_no_process(
    job, tmp_path, pause, names, part, launch
):
    pause(HOLD)
    script = tmp_path / "driver.py"
    runs, ranks = [job(name, part=part) for name in names], (0, 1) if launch else (0,)
    script.write_text(f"CONFIG = {runs[0].config}\n{DRIVER}")
    words = [sys.executable, script, names, runs[0].experiment, runs[0].run_dir.parent, *launch]
    driver = subprocess.Popen(words, cwd=ROOT)
    wait_until(lambda: all(steps(run) for run in runs))
    pids = [at(run, rank)["pid"] for run in runs for rank in ranks]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until(lambda: all(map(gone, pids)))
    for run in runs:
        assert '"stopped"' in (run.run_dir / "summary.json").read_text()
        assert saved(run)


# Several processes per run.


def test_two_processes_stop_with_a_checkpoint_and_go_on_as_the_same_run(opened, job, pause):
    pause(HOLD)
    pool = opened(workers=1, threads=1, launch=SEVERAL)
    run = job("run", part="pair")
    future = pool.submit(run, PAIR)
    wait_until(lambda: saved(run))
    pool.stop()
    assert future.result(300)["status"] == "stopped"
    (reached,) = [int(name.removeprefix("step-")) for name in saved(run)][-1:]
    assert all(gone(at(run, rank)["pid"]) for rank in (0, 1))

    pause(0)
    pool = opened(workers=1, threads=1, launch=SEVERAL)
    summary = pool.submit(run, PAIR).result(300)
    assert (run.run_dir / "log.txt").read_text().count("loading the data") == 4
    assert not (run.run_dir / ".outcome.json").exists()
    alone = job("alone", seed=1)
    assert pool.submit(alone, Needs()).result(300)["status"] == "finished"
    assert not started(alone, rank=1)  # SEVERAL is not for it
    assert (summary["status"], summary["resumed_from"]) == ("finished", [reached])


def test_the_first_process_tells_what_is_wrong_and_the_others_end(opened, job):
    pool = opened(workers=1, threads=1, launch=(*FORKED, "2"))
    run = job("run", REFUSES, part="pair")
    with pytest.raises(UserError, match="^corpus.txt: no such file$"):
        pool.submit(run, Needs()).result(300)
    assert all(gone(at(run, rank)["pid"]) for rank in (0, 1))
    with pytest.raises(RunFailed):
        pool.submit(job("second", SECOND_FAILS, part="pair"), Needs()).result(300)
    assert "no such thing" in (run.run_dir.parent / "second" / "log.txt").read_text()


def test_a_launcher_that_stays_after_the_first_process_has_answered_is_ended(
    opened, job, monkeypatch
):
    """torchrun waits for minutes for a node whose process was gone when it was told to stop."""
    monkeypatch.setenv("TRAINING_STOP_SECONDS", "8")
    run = job("run")
    answer = '{"summary": {"status": "stopped", "step": 3}}'
    script = f"cd {run.run_dir}; touch at-0; read line; echo '{answer}' > {task.ANSWER}; sleep 100"
    pool = opened(workers=1, launch=("sh", "-c", script))
    future = pool.submit(run, Needs())
    wait_until(lambda: started(run))
    pool.stop()
    assert future.result(300) == {"status": "stopped", "step": 3}


def test_a_launch_command_that_ends_without_a_word_is_named(opened, job):
    pool = opened(workers=1, launch=("sh", "-c", "echo no such option >&2; exit 2"))
    with pytest.raises(RunFailed, match="sh ended with code 2 and no word.*\nno such option"):
        pool.submit(job("b"), Needs()).result(300)


def test_a_launch_command_is_as_it_stands_or_has_what_a_run_needs_filled_in(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    words = ("torchrun", "--nnodes={nodes}", "--nproc_per_node={processes}", "--node_rank={rank}")
    node = task.Node(1, "first", 5)
    filled = "torchrun --nnodes=2 --nproc_per_node=16 --node_rank=1".split()
    assert task.launch_command(Needs(16, 16), words, node) == filled
    assert task.launch_command(Needs(), words, node) == []
    assert task.launch_command(Needs(), TWO, node) == list(TWO)
    shipped = task.launch_command(Needs(4, 4), (), node)
    assert "scripts/accelerate/one_node_8gpu_fsdp.yaml" in shipped and "4" in shipped
    assert (task.processes_of_all(TWO), task.processes_of_all(words)) == (2, 1)
    several = ("accelerate", "--num_processes", "16", "--num_machines", "2")
    assert task.processes_of_all(several) == 1


# GPUs, pretended.


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Pretends that nvidia-smi lists some GPUs and that CUDA_VISIBLE_DEVICES is as given."""

    def pretend(count, visible=None):
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        listed = "".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i}abc)\\n" for i in range(count))
        failure = "echo 'GPU 0: lost'; exit 9"  # a driver that does not answer
        body = f"printf '{listed}'" if count else failure
        tool.write_text(f"#!/bin/sh\n{body}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


@pytest.mark.parametrize(
    ("listed", "visible", "expected"),
    [
        (2, None, ["0", "1"]),
        (8, "3,5,GPU-7abc", ["3", "5", "GPU-7abc"]),
        (8, "2,-1,3", ["2"]),  # CUDA ignores what follows an invalid one
        (0, None, []),
        (8, "", []),  # switched off
    ],
)
def test_gpus_are_those_that_cuda_would_see(gpus, listed, visible, expected):
    gpus(listed, visible)
    assert pools.visible_gpus() == expected


class Placed:
    """Submits runs that hold their places until they are released."""

    def __init__(self, pool, job):
        self.pool, self.job, self.runs = pool, job, {}

    def __call__(self, name, gpus):
        run = self.job(name, part="place")
        self.runs[name] = run, self.pool.submit(run, Needs(gpus=gpus))

    def devices(self, *names):
        wait_until(lambda: all(started(self.runs[name][0]) for name in names))
        return [at(self.runs[name][0])["CUDA_VISIBLE_DEVICES"] for name in names]

    def release(self, *names):
        for name in names:
            (self.runs[name][0].run_dir / "go").touch()
        assert all(self.runs[name][1].result(300)["status"] == "finished" for name in names)


@pytest.fixture
def placed(opened, job, monkeypatch):
    monkeypatch.setattr("sweeps.local.cores", lambda: 64)
    return lambda **options: Placed(opened(**options), job)


def test_runs_have_the_gpus_that_they_need_in_the_order_in_which_they_came(gpus, placed):
    gpus(8, "0,1,4,5")
    place = placed()
    place("one", 1)
    place.devices("one")
    place("two", 2)
    assert place.devices("one", "two") == ["0", "1,4"]
    place("more", 2)  # one is free
    place("small", 1)  # waits behind the one that came before
    place.release("two")
    assert place.devices("more", "small") == ["1,4", "5"]
    with pytest.raises(UserError, match="big needs 5 GPUs, but 4 are visible here; lower `gpus`"):
        place("big", 5)


def test_a_run_of_several_gpus_shares_them_with_no_idle_process(gpus, placed):
    gpus(2, "0,1")
    place = placed()
    place("first", 1)
    place.devices("first")
    place("several", 2)
    place.release("first")
    assert place.devices("several") == ["0,1"]
    wait_until(lambda: gone(at(place.runs["first"][0])["pid"]))


@pytest.mark.parametrize("initialized", [True, False])
def test_a_process_gives_gpu_memory_back_when_its_run_ends(job, monkeypatch, initialized):
    freed = []
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: initialized)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: freed.append("cache"))
    run = job("run", part="place")
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "go").touch()
    assert task.perform(run, Needs()) == {"summary": {"status": "finished"}}
    assert freed == ["cache"] * initialized


@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [
        ("0,1", {"workers": 2}, ["0", "1"]),
        ("0,1", {"workers": 4}, ["0", "0", "1", "1"]),  # small runs share a GPU
        ("0,1,2,3", {"workers": 2, "launch": LAUNCHED}, ["0,1", "2,3"]),  # an equal part
        ("", {"workers": 2}, ["", ""]),  # GPUs are not spoken of
    ],
)
def test_workers_at_a_time_share_the_gpus(gpus, placed, visible, options, expected):
    gpus(0, visible)
    place = placed(**options)
    for index in range(len(expected)):
        place(str(index), 1)
        place.devices(str(index))
    assert place.devices(*map(str, range(len(expected)))) == expected
    assert place.pool.slots == options["workers"]


@pytest.mark.parametrize(
    ("visible", "options", "needs", "expected"),
    [
        ("", {"workers": 1}, {}, 8),
        ("", {"workers": 3}, {}, 2),
        ("", {"workers": 20}, {}, 1),
        ("", {"workers": 2, "threads": 5}, {}, 5),
        ("0,1", {}, {}, 4),
        ("0,1", {"workers": 8}, {}, 1),  # which share two GPUs
        ("0,1", {"launch": SEVERAL}, {"gpus": 2, "processes": 2}, 4),  # of each process
        ("0,1", {"launch": ("accelerate", "launch", "--num_processes", "4")}, {}, 2),
    ],
)
def test_threads_are_an_equal_share_of_the_cores(
    gpus, opened, job, monkeypatch, visible, options, needs, expected
):
    gpus(0, visible)
    monkeypatch.setattr("sweeps.local.cores", lambda: 8)
    pool = opened(**options)
    monkeypatch.setattr(pool, "_perform", lambda run, devices: {"summary": run.job.threads})
    assert pool.submit(job("run"), Needs(**needs)).result(300) == expected
