"""scripts/slurm, run whole with tools that note what they are asked in place of SLURM and Ray."""

import os
import shutil
import signal
import subprocess
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from sweeps import slurm_job
from sweeps.pool import Job, Needs
from tests.sweeps.conftest import ROOT, wait_until

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
    "python": """
        case "$*" in
          -c*) echo the-token ;;
          *"sweeps run"*)
            echo "token $RAY_AUTH_TOKEN" >> "$LOG"
            trap 'exit "$CODE"' TERM
            until grep -q "^ray start --address" "$LOG"; do sleep 0.05; done
            while [ -n "$WARNED" ]; do sleep 0.05; done
            exit "$CODE" ;;
        esac
    """,
}


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Starts a script in a copy of the folder; its process, and what the tools were asked."""
    log = tmp_path / "log"
    (tmp_path / "bin").mkdir()
    for name, body in TOOLS.items():
        tool = tmp_path / "bin" / name
        tool.write_text(f'#!/bin/bash\necho "{name} $*" >> "$LOG"\n{body}\n')
        tool.chmod(0o755)
    shutil.copytree(ROOT / "scripts/slurm", tmp_path / "scripts/slurm")
    (tmp_path / "scripts/environment.sh").write_text("")  # it would install what is missing
    own = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_GPUS_ON_NODE": "4",
    }

    def start(name, *words, **more):
        done = subprocess.Popen(
            ["bash", tmp_path / "scripts/slurm" / name, *words],
            cwd=tmp_path,
            env={**os.environ, **own, **more},
            stderr=subprocess.PIPE,
            text=True,
        )
        return done, lambda: log.read_text().splitlines() if log.exists() else []

    return start


def test_several_nodes_have_one_launcher_each(script):
    done, asked = script("several_nodes.sh", "some.yaml", "-m", "x", '{"a": "b c"}')
    assert done.wait(30) == 0, done.stderr.read()
    _, srun, *launchers = asked()
    words = {"--overlap", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=32"}
    assert words == set(srun.partition(" sh ")[0].split()[1:])
    assert launchers == [
        f"accelerate launch --machine_rank {node} --config_file some.yaml --num_machines 2 "
        "--num_processes 8 --main_process_ip first --main_process_port 20123 "
        '-m x {"a": "b c"}'
        for node in (0, 1)
    ]


@pytest.mark.parametrize(
    ("warned", "code", "requeued"),
    [("", 0, False), ("", 1, False), ("yes", 75, True), ("yes", 1, False)],
)
def test_a_driver_in_an_allocation_has_a_cluster_and_is_requeued_once_it_has_saved(
    script, warned, code, requeued
):
    done, asked = script("ray.sh", "s.yaml", "--gpu", "H100", CODE=str(code), WARNED=warned)
    run = "python -m sweeps run s.yaml --gpu H100 --engine ray --address first:20123"
    wait_until(lambda: run in asked())
    if warned:
        second = "ray start --address first:20123 --block"
        wait_until(lambda: "token the-token" in asked() and second in asked())
        done.send_signal(signal.SIGTERM)
    assert done.wait(30) == code, done.stderr.read()
    lines = asked()
    assert (
        "srun --nodes=1 --ntasks=1 --nodelist=first --cpus-per-task=32 --ntasks-per-node=1 "
        "ray start --head --port=20123 --block" in lines
    )
    others = "srun --nodes=1 --ntasks=1 --exclude=first --cpus-per-task=32 --ntasks-per-node=1 sh"
    assert any(line.startswith(others) for line in lines)
    assert "ray start --address first:20123 --block" in lines  # the second node's
    assert not any("the-token" in line for line in lines if not line.startswith("token "))
    assert ("scontrol requeue 123" in lines) == requeued


@pytest.mark.parametrize(("restarts", "resume"), [(None, "never"), ("0", "never"), ("2", "auto")])
def test_a_job_that_was_requeued_keeps_what_it_has_trained(tmp_path, monkeypatch, restarts, resume):
    """Its runs are to start anew once, not each time that the job does."""
    configs = []

    class Pool:
        def __init__(self, options):
            pass

        def submit(self, job, needs):
            configs.append(job.config)
            future = Future()
            future.set_result({"status": "finished"})
            return future

        def shutdown(self):
            pass

    monkeypatch.setattr(slurm_job, "LocalPool", Pool)
    monkeypatch.setattr(slurm_job, "_Asked", lambda: SimpleNamespace(received=[]))
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    if restarts is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    job = Job("run", "toy", {"checkpoint": {"every": 1, "resume": "never"}}, tmp_path / "run")
    work = slurm_job.Runs((job,), Needs(), (), tmp_path)
    work()
    assert configs == [{"checkpoint": {"every": 1, "resume": resume}}] and not work.jobs
