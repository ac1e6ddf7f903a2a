#!/usr/bin/env bash
# Runs the test suite, with the checks of style (ruff) and of types (mypy); arguments go to pytest
# instead, for example: bash scripts/test.sh tests/training
# `quick` runs tests that neither start processes, nor train, nor draw: a minute or so.
# `all` adds those that are marked thorough, as CI does: Ray, downloads, claims, findings and pictures of all figures,
# and the further rows of long tables, such as half of the planted mistakes.
set -euo pipefail
. "$(dirname "$0")/environment.sh"
# Test processes share compiled bytecode, which saves each of them up to six seconds.
unset PYTHONDONTWRITEBYTECODE

if [ "${1:-}" = quick ]; then
  set -- -m "not slow" tests "${@:2}"
fi
if [ "$#" -eq 0 ] || [ "$1" = all ]; then
  part="not thorough"
  [ "$#" -eq 0 ] || { part= && shift; }
  ruff format --check .
  ruff check .
  mypy & types=$!  # which alone would leave the other cores idle
  # Tests wait for processes that they have started: with three in turn two cores are always busy.
  python -m pytest --numprocesses 3 -m "$part" "$@" || failed=$?
  wait "$types" || { echo "mypy has found mistakes; they stand above" >&2; exit 1; }
  exit "${failed:-0}"
fi
exec python -m pytest --numprocesses 3 "$@"
