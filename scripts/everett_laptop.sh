#!/usr/bin/env bash
# Every figure and table of "Scaling Exponents Across Parameterizations and Optimizers" at the
# laptop preset: trains, draws and prints the findings. A second call reuses every run that is done.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

here=(--preset laptop --workers 2 --threads 1)
sweep() { python -m sweeps run "nanolm_c4/sweeps/$1.yaml" "${here[@]}" "${@:2}"; }

python -m nanolm_c4.data nanolm_c4/configs/everett_laptop.yaml >/dev/null

# The best global rate of every parameterisation and optimiser, where all else starts from.
sweep figure_12_adam
sweep figure_11_sgd
sweep figure_13_adafactor
sweep figure_3_param_scaling --curves global

# The constants, tuned at the base width.
python -m sweeps search nanolm_c4/sweeps/constants.yaml "${here[@]}"

sweep figure_2_adam
sweep figure_3_sgd
sweep figure_3_param_scaling
sweep figure_1_5_6_7_alignment
sweep figure_4_epsilon
sweep figure_8_mitigations
sweep figure_9_weight_decay
sweep figure_10_adafactor

out=results/nanolm_c4/everett_laptop
mkdir -p "$out"
draw() { # draw COMMAND TABLE...: one figure's command, its findings also kept in a file
  local tables=()
  for name in "${@:2}"; do tables+=("results/nanolm_c4/${name%:*}_laptop/${name#*:}.csv"); done
  python -m plots "everett/$1" "${tables[@]}" --out "$out" | tee "$out/$1.txt"
}
draw learning_rates figure_11_sgd:results figure_12_adam:results figure_13_adafactor:results
draw loss_vs_size figure_2_adam:results figure_3_sgd:results figure_3_param_scaling:results
draw alignment figure_1_5_6_7_alignment:probes
draw epsilon figure_4_epsilon:results figure_8_mitigations:results
draw weight_decay figure_9_weight_decay:results figure_12_adam:results
draw adafactor figure_10_adafactor:results
echo "figures, findings and Table 4: $out"
