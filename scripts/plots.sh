#!/usr/bin/env bash
# Redraws every shipped figure from the tables in plots/data into plots/figures.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

for figure in quickstart everett.{loss_vs_size,alignment,epsilon,weight_decay,adafactor,learning_rates} \
  theory.{kernels,error,shares,bigram} dinan.{vit_search,vit_strategies,bart_rates,bart_strategies} \
  bordelon.{rate_transfer,head_dimension,dynamics,heads,depth,kernels,decoder}; do
  python -m "plots.$figure"
done
