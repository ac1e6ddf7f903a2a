#!/usr/bin/env bash
# Figures 1 and 2 of Dinan, Yaida & Zhang (Part II) at the laptop preset: a small Vision Transformer on
# handwritten digits, four scaling strategies, each with its own search over learning rate and weight
# decay. Trains, draws and prints the findings; a second call reuses every run that is done.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

results=results/vit_imagenet/figure_1_2_laptop
python -m sweeps run vit_imagenet/sweeps/figure_1_2.yaml --preset laptop --workers 2 --threads 1

for figure in vit_search vit_strategies; do
  python -m plots "dinan/$figure" "$results/results.csv" "$results/metrics.csv" --out "$results" |
    tee "$results/$figure.txt"
done
echo "figures and findings: $results"
