#!/usr/bin/env bash
# Changes one expression of param_groups, its check, the optimisers or the rules of sweeps at a time
# and runs the tests that reach it: a mutant that survives shows a missing test. Arguments are
# patterns of mutants ('param_groups.plan*') or `--sample 35 0`: 35 of each file, drawn by seed 0.
# The last lines list the results; `mutmut show NAME` prints a mutant. A second of one core each,
# all 21,900 in a night; [tool.mutmut] in pyproject.toml says what is run.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
. "$(dirname "$0")/environment.sh"

export OMP_NUM_THREADS=1
python -m pip install --quiet 'mutmut==3.8.1'
if [ "${1:-}" = --sample ]; then
  python -m mutmut run 'param_groups.rows.x__counted*'  # any run writes all mutants first
  # Assigned before `set`, so that a failure ends the script instead of running every mutant.
  names=$(python -m mutmut results --all true | python -c '
import itertools, random, sys
count, seed = map(int, sys.argv[1:])
names = sorted(line.strip().partition(":")[0] for line in sys.stdin)
for _, own in itertools.groupby(names, lambda name: name.rpartition(".")[0]):
    own = list(own)
    print(*random.Random(seed).sample(own, min(count, len(own))))
' "${2:-35}" "${3:-0}")
  set -- $names
fi
exec python -m mutmut run "$@"
