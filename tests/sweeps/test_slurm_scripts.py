"""scripts/slurm, run whole by an imitated sbatch, with tools that note what they are asked."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from tests.sweeps.conftest import HOLD, ROOT, wait_until

# What a script meets in place of SLURM, Ray and Python.
TOOLS = {
    # With several processes a process per node, as SLURM starts them; what Ray starts stays.
    "srun": """
        while [[ $1 == -* ]]; do shift; done
        if [ "$1" = ray ]; then exec sleep 100; fi
        if [[ $* == *"ray start"* ]]; then "$@" & exec sleep 100; fi
        for node in 0 1; do SLURM_NODEID=$node "$@"; done
    """,
    "scontrol": 'if [ "$1" = show ]; then echo first; echo second; fi',
    "ray": '[ -e "$LOG.up" ] || { touch "$LOG.up"; exit 1; }',  # it takes a while to start
    "accelerate": "",
    "sleep": 'if [ "$1" = 2 ]; then exec /bin/sleep 0.1; fi; exec /bin/sleep "$@"',
}
DRIVER = """
    case "$*" in
      -c*) echo the-token ;;
      *"sweeps run"*)
        echo "token ${RAY_AUTH_TOKEN:-}" >> "$LOG"
        trap 'exit "$CODE"' TERM
        until [ "$NODES" = 1 ] || grep -q "^ray start --address" "$LOG"; do sleep 0.05; done
        touch "$LOG.runs"
        while [ -n "$SIGNAL" ]; do sleep 0.05; done
        exit "$CODE" ;;
    esac
"""


class Sbatch:
    """Starts a script as SLURM does: from a copy elsewhere, with the signal that it asks for, and
    again when it has asked to be requeued."""

    def __init__(self, folder, tools, **variables):
        self.log, self.folder = folder / "log", folder
        (folder / "bin").mkdir()
        for name, body in tools.items():
            tool = folder / "bin" / name
            tool.write_text(f'#!/bin/bash\necho "{name} $*" >> "$LOG"\n{body}\n')
            tool.chmod(0o755)
        shutil.copytree(ROOT / "scripts/slurm", folder / "scripts/slurm")
        (folder / "scripts/environment.sh").write_text("")  # it would install what is missing
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        job = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "n[1-2]", "LOG": str(self.log)}
        job |= {"SLURM_CPUS_PER_TASK": "32", "SLURM_GPUS_ON_NODE": "4"}
        job["SLURM_SUBMIT_DIR"] = str(folder)
        self.environment = {**os.environ, "PATH": path, **job, **variables}

    def start(self, name, *words, nodes):
        text = (self.folder / "scripts/slurm" / name).read_text()
        self.options = re.findall(r"^#SBATCH (\S+)", text, re.MULTILINE)
        (self.folder / "spool").mkdir(exist_ok=True)
        script = self.folder / "spool/slurm_script"
        script.write_text(text)
        nodes = dict.fromkeys(("SLURM_JOB_NUM_NODES", "NODES"), str(nodes))
        options = {"env": self.environment | nodes, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(["bash", script, *words], **options)

    def warn(self, job):
        """What SLURM does some time before the job's limit."""
        [(name, seconds)] = re.findall(r"--signal=B:(\w+)@(\d+)", " ".join(self.options))
        assert int(seconds) >= 120  # which runs have to save
        job.send_signal(getattr(signal, f"SIG{name}"))

    def asked(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def is_requeued(self):
        return "--requeue" in self.options and "scontrol requeue 123" in self.asked()


def test_several_nodes_have_one_launcher_each(tmp_path):
    sbatch = Sbatch(tmp_path, TOOLS)
    job = sbatch.start("several_nodes.sh", "some.yaml", "-m", "x", '{"a": "b c"}', nodes=2)
    assert job.wait(300) == 0, job.stderr.read()
    _, srun, *launchers = sbatch.asked()
    words = {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32"}
    assert words == set(srun.partition(" sh ")[0].split()[1:])
    assert launchers == [
        f"accelerate launch --machine_rank {node} --config_file some.yaml --num_machines 2 "
        "--num_processes 8 --main_process_ip first --main_process_port 20123 "
        '-m x {"a": "b c"}'
        for node in (0, 1)
    ]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("sent", "code", "requeued"),
    [("", 0, False), ("", 1, False), ("USR1", 75, True), ("USR1", 1, False), ("TERM", 75, False)],
)
def test_a_warned_job_is_requeued_once_its_driver_has_saved(tmp_path, nodes, sent, code, requeued):
    sbatch = Sbatch(tmp_path, {**TOOLS, "python": DRIVER}, CODE=str(code), SIGNAL=sent)
    job = sbatch.start("sweep.sh", "s.yaml", "--preset", "laptop", nodes=nodes)
    where = "local" if nodes == 1 else "ray --address first:20123"
    wait_until(lambda: (tmp_path / "log.runs").exists())
    if sent == "USR1":
        sbatch.warn(job)
    elif sent:
        job.send_signal(signal.SIGTERM)
    assert job.wait(300) == code  # its messages may be a driver's that lives on
    lines = sbatch.asked()
    assert f"python -m sweeps run s.yaml --preset laptop --engine {where}" in lines
    assert sbatch.is_requeued() == requeued
    if nodes == 1:
        assert not any(line.startswith(("srun", "ray")) for line in lines)
        return
    assert (
        "srun --nodes=1 --ntasks=1 --nodelist=first --cpus-per-task=32 --ntasks-per-node=1 "
        "ray start --head --port=20123 --block" in lines
    )
    others = "srun --nodes=1 --ntasks=1 --exclude=first --cpus-per-task=32 --ntasks-per-node=1 sh"
    assert any(line.startswith(others) for line in lines)
    assert "ray start --address first:20123 --block" in lines  # the second node's
    assert "token the-token" in lines
    assert not any("the-token" in line for line in lines if not line.startswith("token "))


@pytest.mark.thorough
def test_a_sweep_is_warned_saves_is_requeued_and_ends_as_an_undisturbed_one(
    toy, tmp_path, pause, monkeypatch
):
    """The true driver and its runs, on one node."""
    (tmp_path / "base.yaml").write_text(
        "optimizer: {lr: 0.01}\nschedule: {}\ncheckpoint: {every: 1}\n"
        "training: {steps: 6, batch_size: 4, log_every: 1}\n"
    )
    (tmp_path / "s.yaml").write_text(
        f"experiment: {toy}\nconfig: base.yaml\ncurves: {{a: {{}}}}\nseeds: [0, 1, 2]\n"
    )
    tools = {"scontrol": TOOLS["scontrol"]}
    sbatch = Sbatch(tmp_path, tools, PYTHONPATH=os.environ["PYTHONPATH"])

    def started(results):
        return sbatch.start("sweep.sh", "s.yaml", "--results", results, nodes=1)

    def table(results):
        text = (tmp_path / results / toy / "s/results.csv").read_text()
        return re.sub(r"\b[0-9a-f]{40}(\+changes)?", "", text)  # the commit

    assert started("whole").wait(300) == 0
    pause(HOLD)
    job, folder = started("warned"), tmp_path / "warned" / toy / "s"
    wait_until(lambda: list(folder.glob("*/checkpoints/step*/meta.json")))
    sbatch.warn(job)
    assert job.wait(300) == 75 and sbatch.is_requeued()
    pause(0)
    assert started("warned").wait(300) == 0
    resumed = [json.loads(p.read_text())["resumed_from"] for p in folder.glob("*/summary.json")]
    assert sorted(map(len, resumed)) == [0, 0, 1]
    assert table("warned") == table("whole")
