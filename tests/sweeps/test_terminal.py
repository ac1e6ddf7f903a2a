"""What a user sees in a terminal: a bar of a run's steps, and after Ctrl-C nothing left over."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pyte
import pytest

from tests.sweeps.conftest import ROOT, wait_until

BASE = (
    "optimizer: {lr: 0.01}\nschedule: {}\ntraining: {steps: 900, batch_size: 4, log_every: 900}\n"
)
STOPPING = "stopping: runs save a checkpoint; interrupt again to end them now"
# The terminal becomes the controlling one, whose Ctrl-C is a signal.
START = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


class Terminal:
    """A command in a terminal of 40 lines of 150 characters."""

    def __init__(self, *words):
        self.screen = pyte.Screen(150, 40)
        self.master, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            cwd=ROOT,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(other)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        stream = pyte.ByteStream(self.screen)
        while True:
            try:
                stream.feed(os.read(self.master, 4096))
            except OSError:  # the last process that had it has ended
                return

    def lines(self):
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def wait_for(self, pattern):
        wait_until(lambda: self.process.poll() is not None or self.shows(pattern))
        assert self.shows(pattern), self.lines()

    def shows(self, pattern):
        return any(re.search(pattern, line) for line in self.lines())

    def interrupt(self):
        os.write(self.master, b"\x03")

    def end(self):
        code = self.process.wait(300)
        self.reader.join(30)
        return code


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
        found.reader.join(30)
        os.close(found.master)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_sweep_leaves_a_clean_terminal(times, toy, tmp_path, terminal):
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
    assert sweep.end() == (75 if times == 1 else 130)
    last = "stopped; the same command goes on from here" if times == 1 else "interrupted"
    assert STOPPING in sweep.lines()[0] and last in sweep.lines()[-1]
    assert not sweep.screen.cursor.hidden and sweep.screen.cursor.x == 0


def test_a_run_in_a_terminal_has_a_bar_that_ctrl_c_removes(toy, tmp_path, terminal):
    (tmp_path / "base.yaml").write_text(BASE)
    folder = tmp_path / "results" / "toys" / "single" / "run"
    folder.mkdir(parents=True)
    code = f"from {toy}.real.train import EXPERIMENT as e; e.main()"
    run = terminal("-c", code, str(tmp_path / "base.yaml"), "--run-dir", str(folder))
    run.wait_for(r"^step ([4-9]|\d\d+)/900  [━╌]{24}  \d+ s left")
    assert run.shows(r"^step 1/900  train loss \d")
    run.interrupt()
    assert run.end() == 75
    assert not run.shows("━|╌") and run.shows("^stopped: ")
    assert not run.screen.cursor.hidden and run.screen.cursor.x == 0
