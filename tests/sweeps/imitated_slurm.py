"""SLURM's commands on one machine without queue or accounting: jobs start at once.

Each command is a link to this file by its name. IMITATED_SLURM names a folder with a file per task
of a job: `ID` (its process), `ID.step` (what srun started), `ID.requeue`.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("IMITATED_SLURM", "."))


def install(folder: Path) -> dict[str, str]:
    """Makes the commands; the environment with them first on PATH, and their state's folder."""
    (folder / "slurm-bin").mkdir()
    (folder / "slurm-state").mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        path = folder / "slurm-bin" / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {name} "$@"\n')
        path.chmod(0o755)
    path = f"{folder / 'slurm-bin'}{os.pathsep}{os.environ['PATH']}"
    return {"PATH": path, "IMITATED_SLURM": str(folder / "slurm-state")}


def sbatch(script):
    if (STATE / "refuses").exists():
        print((STATE / "refuses").read_text(), file=sys.stderr)
        sys.exit(1)
    number = 100 + len(list(STATE.glob("script-*")))
    (STATE / f"new-{number}").write_text(Path(script).read_text())
    (STATE / f"new-{number}").rename(STATE / f"script-{number}")  # whole for who waits for it
    array = re.search(r"--array=0-(\d+)", Path(script).read_text())
    tasks = [f"{number}_{i}" for i in range(int(array[1]) + 1)] if array else [str(number)]
    for task in tasks:
        (STATE / task).touch()
        if (STATE / "full").exists():  # the job stays in the queue
            continue
        subprocess.Popen(
            [sys.executable, "-S", __file__, "run", task, str(STATE / f"script-{number}")],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    print(f"Submitted batch job {number}")


def run(task, script):
    number, _, index = task.partition("_")
    own = {"SLURM_JOB_ID": number, "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}
    if index:
        own |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": index}
    (STATE / task).write_text(str(os.getpid()))
    while True:
        subprocess.run(["bash", script], env={**os.environ, **own, "IMITATED_TASK": task})
        (STATE / f"{task}.step").unlink(missing_ok=True)
        try:
            (STATE / f"{task}.requeue").unlink()
        except FileNotFoundError:
            break
    (STATE / task).unlink(missing_ok=True)


def srun(*words):
    """The task of a step with one: its output goes where it is told."""
    words, places, task = list(words), {}, os.environ["IMITATED_TASK"]
    number, _, _index = task.partition("_")
    while words[0].startswith("-"):
        word = words.pop(0)
        if word in ("--output", "--error"):
            place = words.pop(0).replace("%j", number).replace("%A_%a", task).replace("%t", "0")
            places[word] = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(places["--output"], 1)
    os.dup2(places["--error"], 2)
    (STATE / f"{task}.step").write_text(str(os.getpid()))
    os.execvp(words[0], words)


def squeue(*words):
    names = (path.name for path in STATE.iterdir())
    print("\n".join(name for name in names if re.fullmatch(r"\d+(_\d+)?", name)))


def scancel(*words):
    options = [word for word in words if word.startswith("-")]
    (STATE / "scancel.txt").open("a").write(" ".join(words) + "\n")
    if "--state=PENDING" in options:
        return  # nothing waits here
    number = [getattr(signal, f"SIG{word[9:]}") for word in options if word.startswith("--signal=")]
    for task in words[len(options) :]:
        try:
            pid = int((STATE / f"{task}.step").read_text())
        except FileNotFoundError:
            continue
        try:
            os.kill(pid, number[0] if number else signal.SIGTERM)
            if not number:
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def scontrol(command, task):
    (STATE / "scontrol.txt").open("a").write(f"{command} {task}\n")
    (STATE / f"{task}.requeue").touch()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
