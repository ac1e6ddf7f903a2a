#!/usr/bin/env bash
# Trains a width sweep on the embedded corpus, draws the figure and prints the findings.
# A second call reuses every run that is done. Options are those of `python -m sweeps run`.
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

stages=("nanolm_c4/quickstart")

prepare() { python -m nanolm_c4.data nanolm_c4/configs/laptop.yaml >/dev/null; }

figures() {
  local results=results/nanolm_c4/quickstart
  python -m plots quickstart "$results/results.csv" --out "$results"
}

sweep_and_draw --workers 2 --threads 1 "$@"
