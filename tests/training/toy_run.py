"""A run small enough to be resumed hundreds of times; the tests start it as a command, too.

    python tests/training/toy_run.py DIR [key=value ...]    one run, exit code as documented

The model draws during training (dropout), so that a resume with other random numbers shows.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from measure.probes import ProbeRecorder
from param_groups import Everett, Muon, Role, Rule, plan
from training import loop, runs, signals
from training.config import parse_overrides, set_keys, validate
from training.errors import one_line_errors
from training.optim import optimizers
from training.settings import RunConfig
from training.task import Task

RULES = (Rule("embedding.weight", Role.TOKEN_EMBEDDING), Rule("readout.weight", Role.READOUT))
SETTINGS = {
    "optimizer": {"name": "adam", "lr": 0.05},
    "schedule": {"warmup_steps": 2},
    "training": {"steps": 7, "batch_size": 4, "log_every": 2, "eval_every": 3, "probe_every": 3},
    "checkpoint": {"every": 2, "minutes": None, "final": True},
}


class Toy(nn.Module):
    """Embedding, dropout, readout; the summed cross-entropy of the next token."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.readout = nn.Linear(8, 11, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.dropout = dropout

    def forward(self, ids):
        if self.training:
            self.calls += 1
        hidden = F.dropout(self.embedding(ids[:, :-1]), self.dropout, self.training)
        logits = self.readout(hidden).flatten(0, 1)
        return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")


class Rows(Dataset):
    """Rows of tokens; says which are read, by process, if TOY_NOTES names a folder."""

    def __init__(self, seed, noted=False, words=11):
        self.noted = noted
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, words, (23, 6), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        if self.noted:
            note("ids", index)
        return self.ids[index]


def note(what, value):
    """Adds a line to this process's notes."""
    folder = os.environ.get("TOY_NOTES")
    if folder:
        with open(f"{folder}/{what}-{os.environ.get('RANK', '0')}", "a") as file:
            file.write(f"{value}\n")


def build_config(overrides=()):
    settings = set_keys(SETTINGS, parse_overrides(overrides))
    return validate(RunConfig, settings, "toy")


def build_task(config, dropout=0.2):
    model, name, width = Toy(dropout), config.optimizer.name, (8, 4)
    rule = Muon(Everett("mup", *width)) if name == "muon" else Everett("mup", *width, name)
    numbers = plan(model, RULES, rule, **config.optimizer.numbers, absorb_multipliers=True)
    return Task(
        config=config,
        model=model,
        plan=numbers,
        train_data=Rows(1, noted=True),
        eval_data=Rows(2),
        loss=lambda model, batch: model(batch),
        count=lambda batch: torch.tensor(batch[:, 1:].numel()),
        recorders=[ProbeRecorder()],
    )


class NotedOptimizer(optimizers.AdamW):
    """Notes the rates it steps with."""

    def step(self, *args, **kwargs):
        note("rates", [group["lr"] for group in self.param_groups])
        return super().step(*args, **kwargs)


def train(run_dir, overrides=(), pause=0.0):
    """Trains in this process and returns the summary."""
    if os.environ.get("TOY_NOTES"):
        optimizers.OPTIMIZERS["adam"] = replace(optimizers.OPTIMIZERS["adam"], make=NotedOptimizer)
    dropout = float(os.environ.get("TOY_DROPOUT", "0.2"))
    return run_task(run_dir, build_task(build_config(overrides), dropout), pause)


def run_task(run_dir, run, pause=0.0, stop_at=None):
    """Trains in this process, which asks itself to stop if told when; returns the summary."""

    def progress(step, steps, loss):
        if loss is None:
            return
        print(f"step {step}", flush=True)
        time.sleep(pause)
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    run_dir.mkdir(parents=True, exist_ok=True)
    return runs.train_once(
        run_dir, run.config, run.plan, lambda: loop.train(run, run_dir, progress), run.data_checksum
    )


def left_behind(run_dir):
    """What a run must end with, whatever happened to it on the way: weights and logs as bytes."""
    states = sorted(run_dir.glob("checkpoints/step-*/*.safetensors"))[-1:]
    logs = [run_dir / "metrics.jsonl", run_dir / "probes.jsonl"]
    rest = {p.name for p in [*run_dir.glob("checkpoints/*"), *run_dir.iterdir()]}
    rest = {name for name in rest if not name.startswith("step-")}
    saved = [(path.parent.name, path.read_bytes()) for path in states]
    return [saved, *(path.read_bytes() for path in logs), rest]


class LoudRequest(signals.StopRequest):
    """Prints that it has taken a signal: two that come at once are one."""

    def _handle(self, number, frame):
        super()._handle(number, frame)
        os.write(1, b"asked to stop\n")


def main():
    folder, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    with one_line_errors(OSError):
        pause = float(os.environ.get("TOY_PAUSE", "0"))
        if train(Path(folder), overrides, pause)["status"] == "stopped":
            raise SystemExit(signals.STOPPED)


if __name__ == "__main__":
    signals.StopRequest = LoudRequest
    main()
