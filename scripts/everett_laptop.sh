#!/usr/bin/env bash
# Every figure and table of "Scaling Exponents Across Parameterizations and Optimizers" at the laptop
# preset: trains, draws and prints the findings. A second call reuses every run that is done.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

sweep() { python -m training.sweep "nanolm_c4/sweeps/$1.yaml" --preset laptop --workers 2 --threads 1 "${@:2}"; }

python -m nanolm_c4.data nanolm_c4/configs/everett_laptop.yaml >/dev/null

# The best global rate of every parameterisation and optimiser, where all else starts from.
sweep figure_12_adam
sweep figure_11_sgd
sweep figure_13_adafactor
sweep figure_3_param_scaling --curves global

# The constants, tuned at the base width.
python -m training.search nanolm_c4/sweeps/constants.yaml --preset laptop --workers 2 --threads 1

sweep figure_2_adam
sweep figure_3_sgd
sweep figure_3_param_scaling
sweep figure_1_5_6_7_alignment
sweep figure_4_epsilon
sweep figure_8_mitigations
sweep figure_9_weight_decay
sweep figure_10_adafactor
