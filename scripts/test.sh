#!/usr/bin/env bash
# Runs the whole test suite; arguments go to pytest, for example: bash scripts/test.sh tests/training
# `quick` runs those that neither start processes, nor train, nor draw: a minute or so.
# Without arguments also the checks of style (ruff) and of types (mypy).
set -euo pipefail
. "$(dirname "$0")/environment.sh"
# What one test process has compiled the next ones need not: up to six seconds for each.
unset PYTHONDONTWRITEBYTECODE

if [ "${1:-}" = quick ]; then
  set -- -m "not slow" tests "${@:2}"
fi
if [ "$#" -eq 0 ]; then
  ruff format --check .
  ruff check .
  mypy & types=$!  # which alone would leave the other cores idle
  # Tests wait for processes that they have started: with four in turn two cores are always busy.
  python -m pytest --numprocesses 4 tests || failed=$?
  wait "$types" || { echo "mypy has found mistakes; they stand above" >&2; exit 1; }
  exit "${failed:-0}"
fi
exec python -m pytest --numprocesses 4 "$@"
