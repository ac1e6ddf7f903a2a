"""Ray on a cluster of two nodes on this machine, with pretended GPUs."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from sweeps.pool import Needs, PoolOptions, RunFailed, open_pool
from tests.processes import Program, gone
from tests.sweeps.conftest import DIES, FAILS, HOLD, REFUSES, ROOT, at, saved, wait_until
from tests.sweeps.test_survives import BASE
from training.errors import UserError

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is an extra", allow_module_level=True)
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.thorough]

# Starts one process of a run on every node, which meet where Ray says.
START = ("env", "RANK={rank}", "NODES={nodes}", "PAIR={address}:{port}", sys.executable)
PAIR = Needs(gpus=16, processes=2)


@pytest.fixture
def opened(open_engine, ray_cluster):
    return lambda **options: open_engine("ray", address=ray_cluster.address, threads=1, **options)


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_runs_have_the_gpus_or_the_share_of_one_that_they_need(opened, job):
    pool = opened()
    whole = {name: job(name, part="place") for name in ("eight", "four")}
    parts = [job(f"part-{index}", part="place") for index in range(3)]
    futures = []
    for count, run in zip((8, 4), whole.values(), strict=True):
        futures.append(pool.submit(run, Needs(gpus=count)))
        at(run)
    futures += [pool.submit(run, Needs(gpus=0.5)) for run in parts]
    seen = {name: at(run)["CUDA_VISIBLE_DEVICES"].split(",") for name, run in whole.items()}
    assert {name: len(set(gpus)) for name, gpus in seen.items()} == {"eight": 8, "four": 4}
    shared = [at(run)["CUDA_VISIBLE_DEVICES"] for run in parts]
    assert len(set(shared)) == 2 and not set(shared) & set(seen["four"])
    assert pool.slots == 6 and at(parts[0])["OMP_NUM_THREADS"] == "1"
    for run in (*whole.values(), *parts):
        (run.run_dir / "go").touch()
    assert {future.result(300)["status"] for future in futures} == {"finished"}


def test_each_process_of_a_run_has_its_part_of_the_cores_and_a_gpu_where_all_are_launched(
    open_engine, ray_cluster, job, capsys
):
    start = ("env", "RANK=0", "WORDS=--num_processes=4", sys.executable)
    eight, launched = job("eight", part="place"), job("launched", part="place")
    pool = open_engine("ray", address=ray_cluster.address, launch=start, workers=1)
    futures = [pool.submit(eight, Needs(processes=8)), pool.submit(launched, Needs())]
    assert pool.slots == 2  # more than `workers` are in flight already
    assert at(eight)["OMP_NUM_THREADS"] == "1"
    assert len(at(launched)["CUDA_VISIBLE_DEVICES"].split(",")) == 4
    pool.submit(job("large"), Needs(processes=17))
    assert "large waits for a node with 17 CPU, 1 GPU" in capsys.readouterr().err
    for run, future in zip((eight, launched), futures, strict=True):
        (run.run_dir / "go").touch()
        assert future.result(300)["status"] == "finished"


def test_a_run_on_two_nodes_is_one_run_and_lost_when_it_loses_one(opened, job, pause):
    pause(HOLD)
    pool, run, other = opened(launch=START), job("two", part="pair"), job("other", part="pair")
    future = pool.submit(run, PAIR)
    wait_until(lambda: saved(run))
    second = at(run, 1)["pid"]
    assert at(run)["pid"] != second
    assert [at(run, rank)["NODES"] for rank in (0, 1)] == ["2", "2"]
    worker = parent(second)
    os.kill(second, signal.SIGSTOP)  # else it would save when the one above it ends
    for pid in (worker, second):
        os.kill(pid, signal.SIGKILL)
    pause(0)
    with pytest.raises(pool.lost):
        future.result(300)

    summary = pool.submit(run, PAIR).result(300)
    assert summary["status"] == "finished" and len(summary["resumed_from"]) == 1
    assert (run.run_dir / "log.txt").read_text().count("loading the data") == 4

    pause(HOLD)
    future = pool.submit(other, PAIR)
    wait_until(lambda: saved(other))
    pool.stop()
    assert future.result(300)["status"] == "stopped"
    wait_until(lambda: all(gone(at(other, rank)["pid"]) for rank in (0, 1)))


def test_futures_hold_what_they_do_on_this_machine(opened, job, capsys, tmp_path, monkeypatch):
    pool = opened()

    def result(name, seed=0):
        return pool.submit(job(name, seed), Needs(gpus=0.25)).result(300)

    assert result("fine")["status"] == "finished"
    with pytest.raises(RunFailed, match="RuntimeError: no such thing; the end of"):
        result("fails", FAILS)
    with pytest.raises(UserError, match="^corpus.txt: no such file$"):
        result("refuses", REFUSES)
    with pytest.raises(pool.lost):
        result("dies", DIES)
    pool.submit(job("large"), Needs(gpus=9))
    assert "large waits for a node with 1 CPU, 9 GPU" in capsys.readouterr().err
    monkeypatch.setattr("os.getcwd", lambda: str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError):
        result("one")
    pool.stop()  # an error before a run begins is now a stop
    assert result("two") == {"status": "stopped"}


def test_a_stopped_run_saves_a_waiting_one_does_not_start_and_then_ray_is_left(
    opened, job, pause, monkeypatch
):
    """Once the last run is let go of: else Ray ends the driver, without a word."""
    pause(HOLD)
    pool, events = opened(), []
    finish, leave = pool._finish, pool.ray.shutdown

    def late(*words):
        finish(*words)
        time.sleep(1)
        events.append("let go of")

    monkeypatch.setattr(pool, "_finish", late)
    monkeypatch.setattr(pool.ray, "shutdown", lambda: (events.append("left"), leave()))
    running, waiting = job("running"), job("waiting", seed=1)
    futures = [pool.submit(running, Needs()), pool.submit(waiting, Needs(gpus=9))]
    wait_until(lambda: saved(running))
    pool.stop()
    assert [future.result(300)["status"] for future in futures] == ["stopped", "stopped"]
    assert json.loads((running.run_dir / "summary.json").read_text())["status"] == "stopped"
    assert not waiting.run_dir.exists()
    pool.shutdown()
    assert events == ["let go of", "let go of", "left"]


def test_without_an_address_ray_starts_here_whatever_runs_on_this_machine(
    ray_cluster, open_engine, job
):
    """Where it dies the sweep ends, and no run is given up for it."""
    pool = open_engine("ray", workers=1, threads=1)
    nodes = pool.ray.nodes()
    assert len(nodes) == 1 and "GPU" not in nodes[0]["Resources"]  # and not the two of the cluster
    future = pool.submit(job("run", part="place"), Needs())
    at(job("run"))
    (job("run").run_dir / "go").touch()
    assert future.result(300)["status"] == "finished"

    future = pool.submit(job("second", part="place"), Needs())
    at(job("second"))
    [raylet] = pool.ray._private.worker._global_node.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGKILL)

    def is_over():  # a driver looks for room all the time
        with suppress(UserError):
            return pool.slots < 0
        return True

    wait_until(is_over)
    with pytest.raises(UserError, match="Ray on this machine has died, and its runs with it"):
        future.result(0)


def test_a_driver_whose_head_is_killed_ends_with_one_line(toy, tmp_path, pause):
    """A process of its own: Ray ends one that waits for a head, after a minute."""
    pause(HOLD)
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "s.yaml"
    grid = "config: base.yaml\ngrid: {optimizer.lr: [0.01]}\ncurves: {a: {}}\n"
    file.write_text(f"experiment: {toy}\n{grid}")
    words = ["run", file, "--results", tmp_path / "r", "--engine", "ray", "--threads", "1"]
    driver = Program("-m", "sweeps", *words, cwd=ROOT)
    wait_until(lambda: driver.poll() is not None or [*(tmp_path / "r").rglob("training")])
    found = ["pgrep", "-P", str(driver.pids[0]), "gcs_server"]
    head = subprocess.run(found, capture_output=True, text=True).stdout
    os.kill(int(head), signal.SIGKILL)
    errors = driver.communicate()[1]
    assert driver.returncode == 2 and errors.count("\n") == 1, errors
    assert errors.startswith("error: --engine ray: Ray on this machine has died, and its runs with")


def test_a_token_that_others_may_read_is_refused(tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.touch(0o644)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    with pytest.raises(UserError, match=f"others may read it.*; chmod 600 {token}"):
        open_pool("ray", PoolOptions(address="127.0.0.1:1"))
    token.chmod(0o600)
    with pytest.raises(UserError, match="no Ray at 127.0.0.1:1: "):
        open_pool("ray", PoolOptions(address="127.0.0.1:1"))
