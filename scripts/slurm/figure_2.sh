#!/usr/bin/env bash
# Figure 2 of Everett et al. at the paper's settings on a SLURM cluster, with all it starts from: the
# rate sweeps of four optimisers, the search for constants, then the figure itself. Each file has a
# driver in a small job, which submits a job per run with the GPUs that the run needs; each driver
# waits for those before it, and where one of them failed the next says what is missing. Arguments
# go to every submission:
#   bash scripts/slurm/figure_2.sh --partition gpu --account mine
# JOBS (128) jobs of a file are in the queue at a time; GPU (H100) is what the nodes have.
set -euo pipefail
. "$(dirname "$0")/../environment.sh"

runs=(--engine slurm --gpu "${GPU:-H100}" --jobs "${JOBS:-128}" --time 12:00:00)
submit() { # submit FILE [OPTION...]: prints the id of the driver's job
  python -m sweeps submit "nanolm_c4/sweeps/$1.yaml" "${runs[@]}" "${@:2}" | tee /dev/stderr |
    awk 'NR == 1 {print $2}'
}

adam=$(submit figure_12_adam "$@")
sgd=$(submit figure_11_sgd "$@")
adafactor=$(submit figure_13_adafactor "$@")
scaling=$(submit figure_3_param_scaling --curves global "$@")
search=$(submit constants --after "$adam:$sgd:$adafactor:$scaling" "$@")
submit figure_2_adam --after "$search" "$@" >/dev/null
