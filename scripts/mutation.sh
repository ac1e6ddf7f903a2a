#!/usr/bin/env bash
# Changes one expression of param_groups or of the rules of sweeps at a time and runs the tests that
# reach it: what survives is a promise without a test. Arguments are patterns of mutants, such as
# 'param_groups.plan*'; `mutmut results` lists the survivors afterwards, `mutmut show NAME` one.
# An hour or more on two cores; [tool.mutmut] in pyproject.toml says what is run.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

export OMP_NUM_THREADS=1
python -m pip install --quiet 'mutmut==3.8.1'
exec python -m mutmut run "$@"
