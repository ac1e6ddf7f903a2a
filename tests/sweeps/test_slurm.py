"""Sweeps as jobs: on this machine, and on a SLURM whose commands are pretended."""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from sweeps import slurm, sweep, workers
from training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
ONE = ("--curves", "one")

# Real runs of the loop; each notes its name when it begins to train, and takes its time.
EXPERIMENT = """
import os, time
import toy_run
from training import loop, runs
from training.settings import RunConfig as Config
from training.experiment import Experiment

def flops(config):
    return config.optimizer.lr

def run(config, run_dir, progress):
    task = toy_run.build_task(config)
    count = task.count

    def slowly(batch):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return count(batch)

    def train():
        with open(run_dir.parent / "calls.txt", "a") as file:
            file.write(run_dir.name + "\\n")
        return loop.train(task, run_dir, progress)

    task.count = slowly
    return runs.train_once(run_dir, config, task.plan, train)

class Toy(Experiment):
    run = staticmethod(run)

EXPERIMENT = Toy(
    name="toy", description="", config=Config, flops=flops, result=str,
    **dict.fromkeys(["build_task", "build_plan", "parameters", "tokens_per_step", "memory"]),
)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A sweep file of three short runs, one of them a curve of its own; jobs find it, too."""
    name = "toy_" + tmp_path.name.replace("-", "_")
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(EXPERIMENT)
    (package / "base.yaml").write_text(
        "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
        "training: {steps: 6, batch_size: 4, log_every: 1000}\n"
    )
    (package / "s.yaml").write_text(
        f"experiment: {name}\nconfig: base.yaml\ncurves:\n"
        "  {a: {grid: {optimizer.lr: [0.01, 0.02]}}, one: {grid: {optimizer.lr: [0.04]}}}\n"
    )
    places = [ROOT, tmp_path, ROOT / "tests" / "training"]
    for place in places[1:]:
        monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return package / "s.yaml"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder of commands, first on PATH: those of SLURM, which note what they are asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    notes = f"open({str(tmp_path / 'scontrol.txt')!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    write(folder / "sbatch", "print('Submitted batch job 123')")
    write(folder / "scontrol", notes)
    write(folder / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


# The task of a step with one: its output goes where srun is told, its id to a file.
SRUN = """
words = sys.argv[1:]
places = {}
while words[0].startswith("-"):
    word = words.pop(0)
    if word in ("--output", "--error"):
        place = words.pop(0).replace("%j", "123").replace("%A_%a", "123_0").replace("%t", "0")
        places[word] = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for descriptor, word in ((1, "--output"), (2, "--error")):
    os.dup2(places[word], descriptor)
with open(os.environ["PID_FILE"], "w") as file:
    file.write(str(os.getpid()))
os.execvp(words[0], words)
"""


def write(path, body):
    path.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    path.chmod(0o755)


def folder(file, results):
    return results / file.parent.name / "s"


def table(file, results):
    return (folder(file, results) / "results.csv").read_text()


def here(file, results, curves=None):
    """The table of the sweep, run in this process."""
    assert sweep.run(sweep.Options(file, curves=curves, results=results, threads=1)) == 0
    return table(file, results)


def submit(file, results, capsys, *options):
    """The ids of submitted jobs and what was printed."""
    slurm.main([str(file), "--results", str(results), "--threads", "1", *options])
    text = capsys.readouterr().out
    return re.match("submitted (.*)", text)[1].split(), text


def wait_until(condition, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def gone(pid):
    """Whether a process has ended; one that nobody has waited for counts."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def saved(file, results):
    return list(folder(file, results).glob("*/checkpoints/step-*"))


def summaries(file, results):
    paths = folder(file, results).glob("*/summary.json")
    return [json.loads(path.read_text()) for path in paths]


def stopped(file, results):
    """The steps at which runs have stopped."""
    return [one["step"] for one in summaries(file, results) if one["status"] == "stopped"]


def resumed(file, results):
    """The steps from which runs went on."""
    return [step for one in summaries(file, results) for step in one["resumed_from"]]


def training(file, results):
    path = folder(file, results) / "calls.txt"
    return Counter(path.read_text().split()) if path.exists() else Counter()


def test_two_jobs_share_a_sweep_and_end_with_the_table_of_one_launcher(file, tmp_path, capsys):
    results = tmp_path / "jobs"
    ids, text = submit(file, results, capsys, "--local", "--jobs", "2")
    assert len(ids) == 2
    logs = folder(file, results) / "slurm"
    assert f"logs     {logs}\n" in text and f"cancel   kill {' '.join(ids)}\n" in text
    expected = here(file, tmp_path / "here")
    wait_until(lambda: all(map(gone, map(int, ids))))
    errors = [(logs / f"{job}_0_log.err").read_text() for job in ids]
    assert table(file, results) == expected, errors
    assert set(training(file, results).values()) == {1} and len(training(file, results)) == 3


def test_a_warned_job_saves_is_requeued_and_goes_on(file, tmp_path, capsys, monkeypatch):
    results = tmp_path / "jobs"
    monkeypatch.setenv("PAUSE", "0.5")
    launch = ("--launch", shlex.quote(sys.executable))  # each run in a process of its own
    (job,), _ = submit(file, results, capsys, "--local", "--jobs", "1", *ONE, *launch)
    wait_until(lambda: saved(file, results))
    (task,) = children(job)
    os.kill(task, signal.SIGUSR2)
    wait_until(lambda: gone(task))
    (step,) = stopped(file, results)
    wait_until(lambda: gone(int(job)))  # submitit has started it again
    log = (folder(file, results) / "slurm" / f"{job}_0_log.err").read_text()
    assert "stopping: runs save a checkpoint" in log and "Traceback" not in log
    assert resumed(file, results) == [step]
    monkeypatch.setenv("PAUSE", "0")
    assert table(file, results) == here(file, tmp_path / "here", ("one",))


def children(pid):
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


class Slurm:
    """Runs the script that was submitted as SLURM would run the first job of the array."""

    def __init__(self, script, tmp_path):
        self.pid_file = tmp_path / "pid"
        environment = {"SLURM_JOB_ID": "124", "SLURM_ARRAY_JOB_ID": "123",
                       "SLURM_ARRAY_TASK_ID": "0", "SLURM_PROCID": "0",
                       "PID_FILE": str(self.pid_file)}  # fmt: skip
        self.script, self.environment = script, environment

    def start(self):
        self.pid_file.unlink(missing_ok=True)
        return subprocess.Popen(["bash", self.script], env={**os.environ, **self.environment})

    def send(self, number):
        os.kill(int(self.pid_file.read_text()), number)


def test_a_job_on_slurm_saves_on_sigterm_and_comes_back_when_warned(
    file, tmp_path, capsys, monkeypatch, tools
):
    results = tmp_path / "jobs"
    ids, text = submit(file, results, capsys, "--jobs", "2", "--time", "60", *ONE)
    assert ids == ["123_0", "123_1"] and "cancel   scancel 123\n" in text
    logs = folder(file, results) / "slurm"
    cluster = Slurm(logs / "123_submission.sh", tmp_path)
    monkeypatch.setenv("PAUSE", "0.5")
    job = cluster.start()
    wait_until(lambda: saved(file, results))
    cluster.send(signal.SIGTERM)
    output = logs / "123_0_0_log.out"
    wait_until(lambda: "SLURM ends this job" in output.read_text())
    (step,) = stopped(file, results)
    # Only SLURM knows whether it was cancelled or preempted: it waits, and asks for nothing.
    assert job.poll() is None and not (tmp_path / "scontrol.txt").exists()
    cluster.send(signal.SIGUSR2)
    assert job.wait(60) != 0
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 123_0\n"
    monkeypatch.setenv("PAUSE", "0")
    assert cluster.start().wait(100) == 0, (logs / "123_0_0_log.err").read_text()
    assert resumed(file, results) == [step]
    assert table(file, results) == here(file, tmp_path / "here", ("one",))


def test_what_is_asked_of_sbatch(file, tmp_path, capsys, tools):
    options = (
        "--jobs 3 --workers 2 --nodes 2 --gpus-per-node 8 --cpus-per-task 16 --time 1-02:30:00 "
        "--partition gpu --account me --mem 64G --launch 'accelerate launch' --slurm mail-type=END "
        "--slurm begin=16:00 --slurm signal_delay_s=300 --slurm exclusive=true "
        "--slurm 'setup=[\"module load cuda\"]'"
    )
    submit(file, tmp_path / "jobs", capsys, *shlex.split(options))
    script = folder(file, tmp_path / "jobs") / "slurm" / "123_submission.sh"
    asked = set(re.findall("^#SBATCH --(.*)$", script.read_text(), re.MULTILINE))
    assert asked >= {
        "array=0-2%3", "nodes=2", "gpus-per-node=8", "cpus-per-task=16", "time=1590",
        "partition=gpu", "account=me", "mem=64G", "mail-type=END", "begin=16:00",
        "signal=USR2@300", "exclusive", "requeue", f"job-name={file.parent.name}-s",
    }  # fmt: skip
    command = next(line for line in script.read_text().splitlines() if line.startswith("srun"))
    assert "--nodes=1 --ntasks=1 --cpus-per-task=16" in command  # one launcher
    assert "\nmodule load cuda\n" in script.read_text()


def test_the_warning_comes_before_what_saving_may_take(file, tmp_path, capsys, tools):
    submit(file, tmp_path / "jobs", capsys, "--jobs", "1")
    script = (folder(file, tmp_path / "jobs") / "slurm" / "123_submission.sh").read_text()
    delay = int(re.search("--signal=USR2@([0-9]+)", script)[1])
    assert delay >= workers.stop_seconds() + 30 and "--time=240" in script


def refused(capsys, file, tmp_path, *options):
    """The one line that a mistake ends with."""
    with pytest.raises(SystemExit) as end:
        slurm.main([str(file), "--results", str(tmp_path / "r"), "--jobs", "2", *options])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--curves", "b"], "has no curve 'b'"),
        (["--nodes", "2"], "--nodes: a job on several nodes needs --launch"),
        (["--local", "--nodes", "2"], "--local has this machine only"),
        (["--local", "--gpus-per-node", "1"], "2 jobs need 2 GPUs, 0 here"),
        (["--local", "--cpus-per-task", "4"], "--cpus-per-task: --local asks no SLURM"),
        (["--local", "--slurm", "qos=long"], "--slurm: --local asks no SLURM"),
        (["--slurm", "time=60"], "--slurm time: use --time"),
        (["--slurm", "cpus-per-task=6"], "use --cpus-per-task"),
        (["--slurm", "qos"], "expected KEY=VALUE, got 'qos'"),
        (["--slurm", "setup=module load x"], "--slurm setup: expected a list"),
        (["--slurm", "signal_delay_s=soon"], "signal_delay_s: expected a number, got 'soon'"),
        (["--time", "3"], "--time: 3 minutes leave no time before the warning, 180 seconds"),
        (["--workers", "0"], "--workers must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_submits_nothing(
    file, tmp_path, capsys, tools, options, message
):
    assert message in refused(capsys, file, tmp_path, *options)
    assert not (tmp_path / "r").exists()


def test_what_sbatch_refuses_is_one_line(file, tmp_path, capsys, tools):
    reason = "sbatch: error: invalid partition specified: x"
    write(tools / "sbatch", f"print({reason!r}, file=sys.stderr); sys.exit(1)")
    with pytest.raises(SystemExit):
        slurm.main([str(file), "--results", str(tmp_path), "--jobs", "2", "--partition", "x"])
    theirs, ours = capsys.readouterr().err.strip().splitlines()
    assert (theirs, ours) == (reason, f"error: sbatch refused the jobs: {reason}")


def test_without_slurm_the_way_to_run_here_is_named(file, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch on PATH" in refused(capsys, file, tmp_path)
    assert "add --local" in refused(capsys, file, tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90:59", 90), ("2:30:00", 150), ("1-0", 1440), ("2-3:30", 3090),
     ("1-02:03:04", 1563), ("0:10", 1)],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_writes_them(text, expected):
    assert slurm.minutes(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "1:2:3:4", "-5", "1d"])
def test_other_time_limits_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no time such as"):
        slurm.minutes(text)


def test_a_search_is_submitted_as_one(tmp_path):
    """What has the key `search` is a search; its options have no curves."""
    path = tmp_path / "constants.yaml"
    path.write_text("search: {prescription.gamma_hidden: [0.1, 10]}\n")
    words = [str(path), "--jobs", "1", "--workers", "3", "--preset", "laptop"]
    args = slurm.parser().parse_args(words)
    job = slurm.launcher(args)
    assert job.module == "sweeps.search"
    options = job.options
    assert (options.search, options.workers, options.preset) == (path, 3, "laptop")
    with pytest.raises(UserError, match="--curves: .*is a search, which has no such"):
        slurm.launcher(slurm.parser().parse_args([*words, "--curves", "a"]))


def test_gpus_of_this_machine_are_shared_between_its_jobs(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,5,6")
    assert slurm._local_gpus(2, None) == [(0, 1), (4, 5)]
    assert slurm._local_gpus(2, 1) == [(0,), (1,)]


def test_the_script_for_several_nodes_starts_one_launcher_on_each(tmp_path, tools):
    """With an srun that starts its command once per node, as SLURM would."""
    write(tools / "accelerate", "print(' '.join(sys.argv[1:]), flush=True)")
    write(tools / "scontrol", "print('first'); print('second')")
    write(tools / "srun", """
import subprocess
words = sys.argv[1:]
while words[0].startswith("-"):
    print("srun", words.pop(0), flush=True)
for node in "01":
    subprocess.run(words, env={**os.environ, "SLURM_NODEID": node}, check=True)
""")  # fmt: skip
    environment = {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "123",
                   "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "32"}  # fmt: skip
    result = subprocess.run(
        ["bash", ROOT / "scripts/slurm/several_nodes.sh", "some.yaml", "-m", "x", '{"a": "b c"}'],
        env={**os.environ, **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    asked = {"--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32"}
    assert {line.removeprefix("srun ") for line in lines[:-2]} == asked
    assert lines[-2:] == [
        f"launch --machine_rank {node} --config_file some.yaml --num_machines 2 --num_processes 8 "
        '--main_process_ip first --main_process_port 20123 -m x {"a": "b c"}'
        for node in (0, 1)
    ]
