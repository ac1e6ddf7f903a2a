#!/usr/bin/env bash
# "Infinite Limits of Multi-head Transformer Dynamics" (Bordelon, Chaudhry & Pehlevan 2024): Vision
# Transformers on CIFAR-5M and a decoder on C4 (bash scripts/download.sh cifar5m c4), scaled in head
# dimension (Figures 2, 11, 13), heads (3, 4), depth (5) and all three (6 to 10; decoder: 7, 12).
#
# One run, configs/paper.yaml with key=value changes, on this node's GPUS (8):
#   bash scripts/vit_cifar5m.sh model.heads=32
# Every sweep and the networks at initialisation, then the figures. Options are those of
# `python -m sweeps run` (--preset laptop; --engine ray). On SLURM a sweep is a job; options are those of
# sbatch, and after -- those of `python -m sweeps run`:
#   bash scripts/vit_cifar5m.sh sweeps
#   bash scripts/vit_cifar5m.sh slurm --partition gpu --gpus-per-node 8 --time 1-0
#   bash scripts/vit_cifar5m.sh draw          # what is done so far
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

stages=(
  "vit_cifar5m/figure_2 vit_cifar5m/figure_11 vit_cifar5m/figure_13 vit_cifar5m/figure_4
   vit_cifar5m/figure_5 vit_cifar5m/figure_6 nanolm_c4/figure_7_12"
)

figures() {
  local preset size table
  preset=$(preset "$@")
  size=${preset#_}
  local vit=results/vit_cifar5m decoder=results/nanolm_c4/figure_7_12$preset
  local out=results/infinite_limits$preset
  for table in kernels attention density; do  # the networks at initialisation have no other preset
    if [[ "$size" =~ ^(laptop)?$ && ! -e "$out/initial_$table.csv" ]]; then
      python -m vit_cifar5m.initial --preset "${size:-paper}" --out "$out"
      break
    fi
  done
  if [ -e "$vit/figure_4$preset/results.csv" ]; then
    python -m vit_cifar5m.distances "$vit/figure_4$preset" || echo "distances: not all runs yet" >&2
  fi
  bordelon() { draw "$out" "bordelon/$1" "${@:2}"; }
  bordelon rate_transfer "$vit/figure_2$preset/results.csv"
  bordelon head_dimension "$vit"/figure_{11,13}"$preset"/observations.csv
  bordelon dynamics "$vit/figure_11$preset/metrics.csv"
  bordelon initial_heads "$out"/initial_{kernels,attention,density}.csv
  bordelon heads "$vit/figure_4$preset"/{distances,metrics}.csv
  bordelon depth "$vit/figure_5$preset"/{observations,results,metrics}.csv
  bordelon kernels "$vit/figure_6$preset"/{observed_kernels,observed_attention,metrics}.csv
  bordelon decoder "$decoder"/{results,metrics,observed_kernels}.csv
  echo "figures and findings: $out"
}

dispatch vit_cifar5m.train vit_cifar5m/configs/paper.yaml "$@"
