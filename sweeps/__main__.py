"""Many runs: `python -m sweeps run|search|cost|submit FILE [options]`; each has its own --help."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

COMMANDS = {"run": "sweep", "search": "search", "cost": "cost", "submit": "slurm"}
USAGE = """usage: python -m sweeps COMMAND FILE [options]

  run     train what a sweep file asks for, on this machine
  search  the study of a search file: constants by Bayesian optimisation
  cost    runs, FLOPs, GPU-hours and memory of sweep files, before anything is trained
  submit  the same work as jobs of a SLURM cluster

`python -m sweeps COMMAND --help` lists a command's options."""


def main(argv: Sequence[str] | None = None) -> None:
    """Hands the rest of the command line to the named command."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(USAGE)
    elif command in COMMANDS:
        importlib.import_module(f"sweeps.{COMMANDS[command]}").main(rest)
    else:
        print(f"error: no command {command!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
