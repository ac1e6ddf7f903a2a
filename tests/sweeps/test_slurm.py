"""Runs as jobs of a SLURM whose commands are imitated, and the driver as a job."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from sweeps import __main__ as command
from sweeps import on_slurm
from sweeps.on_slurm import minutes, parameters
from sweeps.pool import Needs, PoolOptions, RunFailed, open_pool, stop_seconds
from tests.sweeps.conftest import FAILS, HOLD, REFUSES, ROOT, at, saved, wait_until
from training.errors import UserError


@pytest.fixture
def opened(open_engine, slurm):
    return lambda **options: open_engine("slurm", threads=1, **options)


def step(slurm):
    """The process of the only job."""
    return int(next(slurm.glob("*.step")).read_text())


def log(run, name):
    return (run.run_dir.parent / "slurm" / name).read_text()


def asked(slurm, number):
    """What was asked of sbatch for a job, and its srun."""
    text = (slurm / f"script-{number}").read_text()
    srun = next(line for line in text.splitlines() if line.startswith("srun"))
    return set(re.findall("^#SBATCH --(.*)$", text, re.MULTILINE)), srun


def test_a_warned_job_saves_is_requeued_and_resumes(opened, job, slurm, pause):
    pause(HOLD)
    run = job("run")
    future = opened().submit(run, Needs())
    wait_until(lambda: saved(run))
    os.kill(step(slurm), signal.SIGUSR2)
    wait_until(lambda: (slurm / "scontrol.txt").exists())
    assert (slurm / "scontrol.txt").read_text() == "requeue 100\n"
    stopped = json.loads((run.run_dir / "summary.json").read_text())
    pause(0)
    summary = future.result(60)
    assert (summary["status"], summary["resumed_from"]) == ("finished", [stopped["step"]])
    assert "Traceback" not in log(run, "100_0_log.err")


def test_a_preempted_job_saves_and_leaves_the_rest_to_slurm(opened, job, slurm, pause):
    pause(HOLD)
    run = job("run")
    future = opened().submit(run, Needs())
    wait_until(lambda: saved(run))
    os.kill(step(slurm), signal.SIGTERM)
    wait_until(lambda: "SLURM ends this job" in log(run, "100_0_log.out"))
    stopped = json.loads((run.run_dir / "summary.json").read_text())
    # Only SLURM knows whether it was cancelled or preempted: it waits, and asks for nothing.
    assert stopped["status"] == "stopped" and not (slurm / "scontrol.txt").exists()
    assert not future.done()
    pause(0)
    os.kill(step(slurm), signal.SIGUSR2)
    assert future.result(60)["resumed_from"] == [stopped["step"]]


@pytest.mark.parametrize("deleted", [False, True])
def test_what_a_job_left_for_a_driver_that_is_gone_counts_while_the_run_is_there(
    opened, job, slurm, pause, deleted
):
    pause(HOLD)
    run, gone = job("run"), opened()
    gone.submit(run, Needs())
    wait_until(lambda: saved(run))
    gone.shutdown(wait=False)
    pause(0)
    wait_until((run.run_dir.parent / "slurm/run.outcome.json").exists)
    if deleted:  # to train it again
        shutil.rmtree(run.run_dir)
    assert opened().submit(run, Needs()).result(60)["status"] == "finished"
    assert (run.run_dir / "summary.json").exists()
    assert len(list(slurm.glob("script-*"))) == 1 + deleted


def test_small_runs_share_a_job_and_its_gpu_and_outcomes_come_back(opened, job, slurm, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    pool = opened(jobs=3)
    runs = [job(name, part="place") for name in "abcd"]
    runs += [job("user", REFUSES), job("fails", FAILS)]
    futures = [pool.submit(run, Needs(gpus=0.5)) for run in runs]
    assert pool.slots == 6
    assert {at(run)["CUDA_VISIBLE_DEVICES"] for run in runs} == {"7"}
    assert "array=0-2%3" in asked(slurm, 100)[0]  # three jobs of two runs
    for run in runs[:4]:
        (run.run_dir / "go").touch()
    assert [future.result(30)["status"] for future in futures[:4]] == ["finished"] * 4
    with pytest.raises(UserError, match="^corpus.txt: no such file$"):
        futures[4].result(60)
    with pytest.raises(RunFailed, match="RuntimeError: no such thing; the end of"):
        futures[5].result(60)
    assert json.loads(log(runs[0], "jobs.json")) == {}


def test_as_many_runs_are_here_as_the_jobs_in_the_queue_hold(opened, job, slurm):
    """Whatever their needs, the last run's included."""
    (slurm / "full").touch()
    pool, names = opened(jobs=3), iter("abcdefghijklmnop")

    def fill(gpus):
        count = 0
        while pool.slots > len(pool.runs):
            pool.submit(job(next(names), part="place"), Needs(gpus=gpus))
            count += 1
        return count

    pool.submit(job(next(names), part="place"), Needs(gpus=1))
    assert fill(0.25) == 8  # two jobs of four
    wait_until(lambda: all(run.id for run in pool.runs))
    assert len({run.id for run in pool.runs}) == 3 and fill(0.25) == fill(1) == 0


def test_runs_get_jobs_with_their_own_resources(opened, job, slurm, toy):
    options = (
        "partition=gpu account=me mem=64G time=1-02:30:00 "
        "slurm=mail-type=END slurm=begin=16:00 slurm=signal_delay_s=300 slurm=exclusive=true "
        "slurm=requeue=false 'slurm=setup=[\"module load cuda\"]'"
    )
    (slurm / "full").touch()
    words = [word.split("=", 1) for word in shlex.split(options)]
    given = {key: value for key, value in words if key != "slurm"}
    pool = opened(**given, slurm=tuple(value for key, value in words if key == "slurm"))
    for name, needs in {
        "one": Needs(cpus=16),
        "two": Needs(cpus=16),
        "large": Needs(gpus=16, processes=16, nodes=2, cpus=64),
        "cpu": Needs(gpus=0),
    }.items():
        pool.submit(job(name, part="place"), needs)
    wait_until(lambda: len(list(slurm.glob("script-*"))) == 3)
    pair, srun = asked(slurm, 100)
    assert pair >= {
        "array=0-1%2",
        "nodes=1",
        "gpus-per-node=1",
        "cpus-per-task=16",
        "time=1590",
        "partition=gpu",
        "account=me",
        "mem=64G",
        "mail-type=END",
        "begin=16:00",
        "signal=USR2@300",
        "exclusive",
        f"job-name={toy}-s",
    }
    assert not any(word.startswith("requeue") for word in pair)
    assert "--nodes=1 --ntasks=1 --cpus-per-task=16" in srun
    assert "\nmodule load cuda\n" in (slurm / "script-100").read_text()
    assert asked(slurm, 101)[0] >= {"nodes=2", "gpus-per-node=8", "cpus-per-task=32"}
    assert not any(word.startswith("gpus") for word in asked(slurm, 102)[0])


@pytest.mark.parametrize(
    ("needs", "options", "cpus", "packs"),
    [
        (Needs(gpus=0.25, cpus=4), {}, 16, 1),
        (Needs(gpus=0.25, cpus=4), {"pack": 2}, 8, 2),
        (Needs(gpus=0, cpus=4), {"pack": 4}, 16, 1),
        (Needs(gpus=1, cpus=4), {"pack": 4}, 4, 1),  # one after another
        (Needs(gpus=1, cpus=4), {"pack": 4, "gpus_per_node": 2}, 8, 1),
        (Needs(gpus=4, processes=4), {}, 4, 4),
        (Needs(gpus=16, processes=16, nodes=2), {}, 8, 4),
        (Needs(gpus=0.25, cpus=4), {"cpus_per_task": 2}, 2, 1),
        # What it starts has its job's GPUs, whatever their number.
        (Needs(gpus=0.25, cpus=4), {"launch": ("sh", "-c", "exit 0")}, 4, 4),
        (Needs(gpus=0.25, cpus=4), {"launch": ("sh", "-c", "exit {processes}")}, 16, 1),
    ],
)
def test_a_job_has_cores_for_all_runs_that_it_trains_at_once(
    opened, job, slurm, needs, options, cpus, packs
):
    (slurm / "full").touch()
    pool = opened(**options)
    for name in "abcd":
        pool.submit(job(name, part="place"), needs)
    wait_until(lambda: list(slurm.glob("script-*")))
    said, srun = asked(slurm, 100)
    assert f"cpus-per-task={cpus}" in said and f" --cpus-per-task={cpus} " in srun
    arrays = [word for word in said if word.startswith("array=")]
    assert arrays == ([f"array=0-{packs - 1}%{packs}"] if packs > 1 else [])


def test_what_the_disk_refuses_ends_every_run_of_the_batch(opened, job, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(on_slurm, "submit", full)
    pool = opened()
    futures = [pool.submit(job(name), Needs(gpus=gpus)) for name, gpus in (("a", 1), ("b", 2))]
    for future in futures:
        with pytest.raises(OSError, match="No space left"):
            future.result(10)


def test_the_warning_comes_before_what_saving_may_take(slurm):
    given = parameters(PoolOptions())
    assert given["signal_delay_s"] >= stop_seconds() + 30 and given["time"] == 240
    assert given["additional_parameters"] == {"requeue": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slurm": ("time=60",)}, "--slurm time: use --time"),
        ({"slurm": ("cpus-per-task=6",)}, "use --cpus-per-task"),
        ({"slurm": ("nodes=2",)}, "--slurm nodes: use `needs` in the sweep file"),
        ({"slurm": ("qos",)}, "expected KEY=VALUE, got 'qos'"),
        ({"slurm": ("setup=module load x",)}, "--slurm setup: expected a list"),
        ({"slurm": ("signal_delay_s=soon",)}, "signal_delay_s: expected a number, got 'soon'"),
        ({"time": "3"}, "--time: 3 minutes leave no time before the warning, 180 seconds"),
        ({"time": "soon"}, "--time: 'soon' is no time such as 90, 12:00:00 or 2-00:00:00"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(slurm, options, message):
    with pytest.raises(UserError, match=message):
        open_pool("slurm", PoolOptions(**options))


def test_what_sbatch_refuses_is_one_line(opened, job, slurm):
    (slurm / "refuses").write_text("sbatch: error: invalid partition specified: x")
    future = opened(partition="x").submit(job("run"), Needs())
    with pytest.raises(UserError, match="^sbatch refused the jobs: sbatch: error: invalid parti"):
        future.result(30)


def test_without_slurm_the_way_to_run_here_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch on PATH: .*--engine local trains on this"):
        open_pool("slurm", PoolOptions())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90:59", 90),
        ("2:30:00", 150),
        ("1-0", 1440),
        ("2-3:30", 3090),
        ("1-02:03:04", 1563),
        ("0:10", 1),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1d"])
def test_other_time_limits_are_refused(text):
    with pytest.raises(UserError, match="is no time such as"):
        minutes(text)


# The driver as a job.


@pytest.fixture
def file(toy, tmp_path, monkeypatch, pause):
    package = tmp_path / toy
    (package / "base.yaml").write_text(
        "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
        "training: {steps: 12, batch_size: 4, log_every: 1}\n"
    )
    (package / "s.yaml").write_text(
        f"experiment: {toy}\nconfig: base.yaml\ncurves: {{a: {{}}}}\n"
        "grid: {optimizer.lr: [0.01, 0.02]}\n"
    )
    monkeypatch.chdir(ROOT)
    pause(HOLD)
    return package / "s.yaml"


@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_a_driver_that_is_warned_comes_back_and_ends(engine, file, tmp_path, slurm, capsys, pause):
    results = tmp_path / "results"
    words = ["--engine", engine, "--threads", "1", "--partition", "gpu", "--gpus-per-node", "2"]
    command.main(["submit", str(file), "--results", str(results), *words, "--after", "7:8"])
    text = capsys.readouterr().out
    folder = results / file.parent.name / "s"
    assert text.startswith("submitted 100\n") and f"logs     {folder / 'slurm'}\n" in text
    own = asked(slurm, 100)[0]
    assert own >= {"partition=gpu", "dependency=afterany:7:8", "requeue"}
    assert ("gpus-per-node=2" in own) == (engine == "local")  # else its runs' jobs have them
    wait_until(lambda: list(folder.glob("*/checkpoints/step-*")))
    job = (slurm / "100.step").read_text()
    started = subprocess.run(["pgrep", "-P", job], capture_output=True, text=True).stdout
    for pid in (*started.split(), job):  # SLURM signals every process of a job
        os.kill(int(pid), signal.SIGUSR2)
    wait_until(lambda: (slurm / "scontrol.txt").exists())
    pause(0)
    wait_until(lambda: not (slurm / "100").exists())
    assert (folder / "results.csv").read_text().count("finished") == 2
    ended = [json.loads(path.read_text()) for path in folder.glob("*/summary.json")]
    resumed = [one["resumed_from"] for one in ended]
    assert any(resumed) == (engine == "local")  # jobs went on without it
    if engine == "slurm":
        assert "gpus-per-node=2" in asked(slurm, 101)[0]
        assert not any("dependency" in word for word in asked(slurm, 101)[0])


def test_a_driver_that_is_cancelled_has_the_jobs_of_its_runs_save_and_end(
    file, tmp_path, slurm, capsys
):
    words = ["--engine", "slurm", "--threads", "1", "--gpus-per-node", "0"]
    command.main(["submit", str(file), "--results", str(tmp_path / "results"), *words])
    assert "cancel   scancel 100\n" in capsys.readouterr().out
    folder = tmp_path / "results" / file.parent.name / "s"
    wait_until(lambda: len(list(folder.glob("*/checkpoints/step-00000001"))) == 2)
    driver = int((slurm / "100.step").read_text())
    os.kill(driver, signal.SIGTERM)
    wait_until(lambda: "SLURM ends this job" in (folder / "slurm/100_0_log.out").read_text())
    os.kill(driver, signal.SIGKILL)
    ended = [json.loads(path.read_text())["status"] for path in folder.glob("*/summary.json")]
    assert ended == ["stopped"] * 2
    wait_until(lambda: not list(slurm.glob("10?_?")))  # the runs' jobs are over


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("engine", ["local", "slurm"])
def test_options_of_run_are_handed_to_the_driver_wherever_they_stand(
    file, tmp_path, slurm, capsys, monkeypatch, engine, order
):
    file.write_text(file.read_text() + "presets: {laptop: {seeds: [0, 1]}}\n")
    work = []
    monkeypatch.setattr(on_slurm, "submit", lambda drivers, *_: work.extend(drivers) or ["100"])
    monkeypatch.chdir(tmp_path)
    parts = [
        [str(file)],
        ["--preset", "laptop", "--gpu", "H100", "--curves", "a", "--results", "some results"],
        ["--launch", "accelerate launch --time x", "--engine", engine],
    ][::order]
    own = ["--partition", "gpu", "--slurm=qos=long", "--slurm", "exclusive=true"]
    given = [word for part in (*parts, own) for word in part]
    command.main(["submit", "--after", "7:8", *given])
    folder = tmp_path / "some results" / file.parent.name / "s_laptop"
    assert f"results  {folder}\n" in capsys.readouterr().out
    # What sbatch is asked of a driver that trains the runs itself is not said to it.
    assert work[0].words == tuple(given if engine == "slurm" else given[: -len(own)])
    assert work[0].detached == (engine == "slurm")


def test_a_mistake_in_the_file_is_found_before_a_job_is_submitted(file, slurm, capsys):
    file.write_text(file.read_text() + "gird: {}\n")
    with pytest.raises(SystemExit) as end:
        command.main(["submit", str(file)])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "gird" in said and said.count("\n") == 1
    assert not list(slurm.glob("script-*"))


def test_a_dry_run_of_submit_takes_and_checks_the_options_of_its_own_job(file, capsys):
    words = ["submit", str(file), "--dry-run", "--partition", "gpu", "--time"]
    command.main([*words, "90"])
    assert "runs to do" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        command.main([*words, "soon"])
    assert end.value.code == 2 and "error: --time: 'soon' is no time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("needs", "words", "gpus", "cpus"),
    [
        ("needs: {gpus: 1}\n", "", 1, 1),
        ("needs: {gpus: 0, cpus: 3}\n", "", None, 3),
        ("needs: {gpus: 0, cpus: 3}\n", "--workers 4", None, 12),
        ("needs: {gpus: 0.25, cpus: 3}\n", "", 1, 6),  # there are two runs
        ("needs: {gpus: 0.25, cpus: 3}\n", "--launch true", 1, 3),
        ("needs: {gpus: 1}\n", "--gpus-per-node 2", 2, 2),
        ("needs: {gpus: 1}\n", "--gpus-per-node 2 --cpus-per-task 64", 2, 64),
        (
            "adjust: [{where: {optimizer.lr: [0.02]}, needs: {gpus: 4, processes: 4, cpus: 8}}]\n",
            "--gpu H100",
            4,
            8,
        ),
        (
            "adjust: [{where: {optimizer.lr: [0.02]}, needs: {gpus: 8, processes: 8, nodes: 2}}]\n",
            "--gpu H100",
            1,
            1,
        ),
        ("", "", 1, 1),
    ],
)
def test_a_driver_that_trains_has_room_for_the_largest_of_the_runs_left(
    file, slurm, tmp_path, capsys, needs, words, gpus, cpus
):
    file.write_text(file.read_text() + needs)
    (slurm / "full").touch()
    command.main(["submit", str(file), "--results", str(tmp_path), *words.split()])
    said = asked(slurm, 100)[0]
    assert [word for word in said if word.startswith("gpus")] == (
        [f"gpus-per-node={gpus}"] if gpus else []
    )
    assert f"cpus-per-task={cpus}" in said
    assert ("no GPU to go by: the job gets 1 GPU" in capsys.readouterr().err) == (not needs)


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_driver_of_ray_has_a_script(file, slurm, capsys, more):
    with pytest.raises(SystemExit) as end:
        command.main(["submit", str(file), "--engine", "ray", *more])
    assert end.value.code == 2 and "scripts/slurm/ray.sh" in capsys.readouterr().err


def test_no_job_is_lost_while_slurm_does_not_answer(opened, job, slurm):
    """squeue fails now and then on a busy cluster."""
    run = job("run", part="place")
    future = opened().submit(run, Needs())
    at(run)
    tool = Path(os.environ["PATH"].split(os.pathsep)[0]) / "squeue"
    tool.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(TimeoutError):
        future.result(1.5)  # it is asked every third of a second
    (run.run_dir / "go").touch()
    assert future.result(30)["status"] == "finished"


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--workers 0", "--workers must be at least 1"),
        ("--jobs 8", "--jobs goes with --engine slurm"),
        ("--pack 2", "--pack goes with --engine slurm"),
        ("--engine slurm --workers 2", "--workers goes with --engine local or ray"),
        ("--gpus-per-node -1", "--gpus-per-node must be at least 0"),
    ],
)
def test_a_driver_is_not_submitted_that_would_refuse_its_options(
    file, slurm, capsys, words, line, more
):
    with pytest.raises(SystemExit) as end:
        command.main(["submit", str(file), *words.split(), *more])
    assert end.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"
    assert not list(slurm.glob("script-*"))
