#!/usr/bin/env bash
# Two figures of Everett et al. at the paper's settings on a SLURM cluster: the rate sweeps of
# Figure 12, and Figure 2, whose rates start around their optima and whose jobs wait for them. The
# constants of `python -m training.search` must be there. Arguments go to both submissions:
#   bash scripts/slurm/figures_12_and_2.sh --partition gpu --account mine --slurm qos=long
# JOBS (16) nodes of GPUS (8) work at a time, one run per GPU.
set -euo pipefail
. "$(dirname "$0")/../environment.sh"

gpus=${GPUS:-8}
nodes=(--jobs "${JOBS:-16}" --workers "$gpus" --gpus-per-node "$gpus" --time 12:00:00)
submitted=$(python -m training.slurm nanolm_c4/sweeps/figure_12_adam.yaml "${nodes[@]}" "$@")
echo "$submitted"
first=$(awk 'NR == 1 {sub("_.*", "", $2); print $2}' <<<"$submitted")
python -m training.slurm nanolm_c4/sweeps/figure_2_adam.yaml "${nodes[@]}" \
  --slurm "dependency=afterok:$first" "$@"
