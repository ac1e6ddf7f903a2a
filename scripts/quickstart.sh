#!/usr/bin/env bash
# Trains a width sweep on the embedded corpus, draws the figure and prints the findings.
# A second call reuses every run that is done.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

results=results/nanolm_c4/quickstart
python -m nanolm_c4.data nanolm_c4/configs/laptop.yaml >/dev/null
python -m sweeps run nanolm_c4/sweeps/quickstart.yaml --workers 2 --threads 1
python -m plots quickstart "$results/results.csv" --out "$results"
