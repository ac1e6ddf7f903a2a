#!/usr/bin/env bash
# Runs the test suite, with the checks of style (ruff) and of types (mypy); arguments go to pytest
# instead, for example: bash scripts/test.sh tests/training
# `quick` runs tests that neither start processes, nor train, nor draw: a minute or so.
# `all` adds those that are marked thorough, as CI does: a cluster of Ray, every preset's pictures.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
# What one test process has compiled the next ones need not: up to six seconds for each.
unset PYTHONDONTWRITEBYTECODE

if [ "${1:-}" = quick ]; then
  set -- -m "not slow" tests "${@:2}"
fi
if [ "$#" -eq 0 ] || [ "$1" = all ]; then
  [ "$#" -eq 0 ] && part="not thorough" || part=
  ruff format --check .
  ruff check .
  mypy & types=$!  # which alone would leave the other cores idle
  # Tests wait for processes that they have started: with four in turn two cores are always busy.
  python -m pytest --numprocesses 4 -m "$part" tests || failed=$?
  wait "$types" || { echo "mypy has found mistakes; they stand above" >&2; exit 1; }
  exit "${failed:-0}"
fi
exec python -m pytest --numprocesses 4 "$@"
