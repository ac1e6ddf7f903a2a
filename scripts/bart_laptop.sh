#!/usr/bin/env bash
# Figures 3 and 4 of Dinan, Yaida & Zhang (Part II) at the laptop preset: a narrow BART by span
# denoising on the embedded corpus, two strategies over learning rates at two widths. Trains, draws
# and prints the findings; a second call reuses every run that is done.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

results=results/bart_span_denoise/figure_3_4_laptop
python -m bart_span_denoise.data bart_span_denoise/configs/laptop.yaml >/dev/null
python -m sweeps run bart_span_denoise/sweeps/figure_3_4.yaml --preset laptop \
  --workers 2 --threads 1

for figure in bart_rates bart_strategies; do
  python -m plots "dinan/$figure" "$results/results.csv" "$results/metrics.csv" --out "$results" |
    tee "$results/$figure.txt"
done
echo "figures and findings: $results"
