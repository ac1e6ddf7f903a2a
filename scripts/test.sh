#!/usr/bin/env bash
# Runs the whole test suite; arguments go to pytest, for example: bash scripts/test.sh tests/training
set -euo pipefail
. "$(dirname "$0")/environment.sh"

if [ "$#" -eq 0 ]; then set -- tests; fi
exec python -m pytest --numprocesses 2 "$@"
