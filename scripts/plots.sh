#!/usr/bin/env bash
# Redraws every shipped figure from the tables in plots/data into plots/figures.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

for figure in width_sweep loss_vs_size alignment epsilon weight_decay adafactor learning_rates \
  theory_kernels theory_error theory_shares bigram_exponents \
  vit_search vit_strategies bart_rates bart_strategies \
  infinite_rate_transfer infinite_head_dimension infinite_dynamics infinite_heads infinite_depth \
  infinite_kernels infinite_decoder; do
  python -m "plots.$figure"
done
