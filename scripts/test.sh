#!/usr/bin/env bash
# Runs the whole test suite; arguments go to pytest, for example: bash scripts/test.sh tests/training
# Without arguments also the checks of style (ruff) and of param_groups' types (mypy).
set -euo pipefail
. "$(dirname "$0")/environment.sh"

if [ "$#" -eq 0 ]; then
  ruff check .
  mypy
  set -- tests
fi
exec python -m pytest --numprocesses 2 "$@"
