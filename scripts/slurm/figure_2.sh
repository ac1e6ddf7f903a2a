#!/usr/bin/env bash
# Figure 2 of Everett et al. at the paper's settings on a SLURM cluster, with all it starts from: the
# rate sweeps of four optimisers, the search for constants, then the figure itself. Each job waits
# for those before it; where one of them failed, the next says what is missing. Arguments go to
# every submission:
#   bash scripts/slurm/figure_2.sh --partition gpu --account mine
# JOBS (16) nodes of GPUS (8) work at a time on each file, one run per GPU.
set -euo pipefail
. "$(dirname "$0")/../environment.sh"

gpus=${GPUS:-8}
nodes=(--jobs "${JOBS:-16}" --workers "$gpus" --gpus-per-node "$gpus" --time 12:00:00)
submit() { # submit FILE [OPTION...]: prints the id of the array
  python -m sweeps submit "nanolm_c4/sweeps/$1.yaml" "${nodes[@]}" "${@:2}" | tee /dev/stderr |
    awk 'NR == 1 {sub("_.*", "", $2); print $2}'
}

adam=$(submit figure_12_adam "$@")
sgd=$(submit figure_11_sgd "$@")
adafactor=$(submit figure_13_adafactor "$@")
scaling=$(submit figure_3_param_scaling --curves global "$@")
search=$(submit constants --slurm "dependency=afterany:$adam:$sgd:$adafactor:$scaling" "$@")
submit figure_2_adam --slurm "dependency=afterany:$search" "$@" >/dev/null
