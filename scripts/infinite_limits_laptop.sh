#!/usr/bin/env bash
# Bordelon, Chaudhry & Pehlevan at the laptop presets: Vision Transformers on drawn images and a decoder
# on the World English Bible, scaled in head dimension (Figures 2, 11, 13), heads (3, 4), depth (5) and
# all three (6 to 10; decoder: 7, 12). Trains, draws and prints the findings; a second call reuses every
# run that is done, and the tables of networks at initialisation if all are there.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

vit=results/vit_cifar5m
decoder=results/nanolm_c4/figure_7_12_laptop
out=results/infinite_limits_laptop
mkdir -p "$out"

draw() { # figure, tables ...
  python -m plots "bordelon/$1" "${@:2}" --out "$out" | tee "$out/$1.txt"
}

for table in kernels attention density; do
  if [ ! -e "$out/initial_$table.csv" ]; then
    python -m vit_cifar5m.initial --preset laptop --out "$out"
    break
  fi
done
for figure in 2 11 13 4 5 6; do
  python -m sweeps run "vit_cifar5m/sweeps/figure_$figure.yaml" --preset laptop --workers 2 --threads 1
done
python -m vit_cifar5m.distances "$vit/figure_4_laptop"
python -m sweeps run nanolm_c4/sweeps/figure_7_12.yaml --preset laptop --workers 2 --threads 1

draw rate_transfer "$vit/figure_2_laptop/results.csv"
draw head_dimension "$vit"/figure_{11,13}_laptop/observations.csv
draw dynamics "$vit/figure_11_laptop/metrics.csv"
draw heads "$out"/initial_{kernels,attention,density}.csv "$vit"/figure_4_laptop/{distances,metrics}.csv
draw depth "$vit"/figure_5_laptop/{observations,results,metrics}.csv
draw kernels "$vit"/figure_6_laptop/{observed_kernels,observed_attention,metrics}.csv
draw decoder "$decoder"/{results,metrics,observed_kernels}.csv
echo "figures and findings: $out"
