"""What a user sees in a terminal: the steps of a run, and what Ctrl-C does to a sweep there."""

import fcntl
import os
import pty
import subprocess
import sys
import termios
import threading

import pytest

from tests.sweeps.conftest import ROOT, wait_until

BASE = "optimizer: {lr: 0.01}\nschedule: {}\ntraining: {steps: 900, batch_size: 4, log_every: 2}\n"
STOPPING = "stopping: runs save a checkpoint; interrupt again to end them now"


class Terminal:
    """A command in a terminal of its own, whose Ctrl-C is a signal, and what it has shown."""

    def __init__(self, *words):
        self.text, (self.master, other) = "", pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        while True:
            try:
                self.text += os.read(self.master, 4096).decode()
            except OSError:  # the last process that had it has ended
                return

    def wait_for(self, words):
        wait_until(lambda: words in self.text or self.process.poll() is not None)
        assert words in self.text, self.text

    def interrupt(self):
        os.write(self.master, b"\x03")

    def end(self):
        """The exit code, and the last line."""
        code = self.process.wait(300)
        self.reader.join(300)
        return code, self.text.splitlines()[-1].removeprefix("^C")


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(*words):
        started.append(Terminal(*words))
        return started[-1]

    (tmp_path / "pause").write_text("0.05")
    yield start
    for found in started:
        found.process.kill()
        found.process.wait()
        found.reader.join(300)
        os.close(found.master)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_has_a_sweep_save_and_a_second_one_ends_it(times, toy, tmp_path, terminal):
    (tmp_path / toy / "base.yaml").write_text(BASE)
    file = tmp_path / toy / "s.yaml"
    file.write_text(
        f"experiment: {toy}\nconfig: base.yaml\ngrid: {{optimizer.lr: [0.01, 0.02]}}\n"
        "curves: {a: {}}\n"
    )
    options = ["--results", str(tmp_path / "results"), "--workers", "2", "--threads", "1"]
    sweep = terminal("-m", "sweeps", "run", str(file), *options)
    folders = tmp_path / "results" / toy / "s"
    wait_until(lambda: len(list(folders.glob("*/training"))) == 2)
    if times == 2:  # their next steps end long after the second Ctrl-C
        (tmp_path / "pause.new").write_text("100")
        (tmp_path / "pause.new").rename(tmp_path / "pause")
    for _ in range(times):
        sweep.interrupt()
        if times == 2:
            sweep.wait_for(STOPPING)
    ends = {1: (75, "stopped; the same command goes on from here"), 2: (130, "interrupted")}
    assert sweep.end() == ends[times] and STOPPING in sweep.text, sweep.text


def test_a_run_says_its_steps_and_the_time_left_and_ends_at_ctrl_c(toy, tmp_path, terminal):
    (tmp_path / "base.yaml").write_text(BASE)
    folder = tmp_path / "results/toys/single/run"
    folder.mkdir(parents=True)
    code = f"from {toy}.real.train import EXPERIMENT as e; e.main()"
    run = terminal("-c", code, str(tmp_path / "base.yaml"), "--run-dir", str(folder))
    run.wait_for("step 1/900  train loss ")
    run.wait_for(" s left")
    run.interrupt()
    code, last = run.end()
    assert code == 75 and last.startswith("stopped: ")
