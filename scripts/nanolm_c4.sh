#!/usr/bin/env bash
# "Scaling Exponents Across Parameterizations and Optimizers" (Everett et al. 2024) on GPU nodes, after
# bash scripts/download.sh c4 --shards 512 (without --shards for what trains 50,000 steps alone: one
# run, and ONLY without Figures 9 and 11 to 13).
#
# Text is tokenised once, 19 hours of one core. `sweeps` does so before it trains; before `slurm` do
# it yourself, as the GPUs of the first jobs would wait for it, and their time limit end it:
#   bash scripts/nanolm_c4.sh prepare
#
# One run, configs/paper.yaml with key=value changes, on this node's GPUS (8), or on NODES nodes,
# called on every one of them with its rank and the first one's address:
#   bash scripts/nanolm_c4.sh optimizer.lr=2e-3 model.width=1024
#   NODES=2 NODE=0 FIRST_NODE=10.0.0.1 bash scripts/nanolm_c4.sh
# Every sweep in the order in which they need each other, then the figures and Table 4. Options are
# those of `python -m sweeps run` (--preset laptop; --engine ray; --dry-run). On SLURM a sweep is a job;
# options are those of sbatch, and after -- those of `python -m sweeps run`. --dry-run says what is missing,
# what it costs and which jobs there would be; above 1,000 GPU-hours --yes submits them. The largest runs
# take 64 GPUs: on fewer leave them out (-- --where 'model.width<=8192').
#   bash scripts/nanolm_c4.sh sweeps
#   bash scripts/nanolm_c4.sh slurm --partition gpu --nodes 8 --gpus-per-node 8 --time 2-0 --dry-run
#   bash scripts/nanolm_c4.sh draw            # what is done so far
# Figure 2 with all that it starts from:
#   ONLY="figure_11_sgd figure_12_adam figure_13_adafactor figure_3_param_scaling:global constants
#     figure_2_adam" bash scripts/nanolm_c4.sh slurm --partition gpu --nodes 8 --gpus-per-node 8 --time 2-0 --yes
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

stages=(
  # The best global rate of every parameterisation and optimiser, where all else starts from.
  "nanolm_c4/figure_12_adam nanolm_c4/figure_11_sgd nanolm_c4/figure_13_adafactor
   nanolm_c4/figure_3_param_scaling:global"
  # The constants, tuned at the base width.
  "nanolm_c4/constants"
  "nanolm_c4/figure_2_adam nanolm_c4/figure_3_sgd nanolm_c4/figure_3_param_scaling
   nanolm_c4/figure_1_5_6_7_alignment nanolm_c4/figure_9_weight_decay nanolm_c4/depth"
  "nanolm_c4/figure_4_epsilon nanolm_c4/figure_8_mitigations nanolm_c4/figure_10_adafactor"
)

figures() {
  local preset
  preset=$(preset "$@")
  local out=results/nanolm_c4/everett$preset
  everett() { # everett FIGURE SWEEP:TABLE ...
    local tables=() name
    for name in "${@:2}"; do tables+=("results/nanolm_c4/${name%:*}$preset/${name#*:}.csv"); done
    draw "$out" "everett/$1" "${tables[@]}"
  }
  everett learning_rates figure_11_sgd:results figure_12_adam:results figure_13_adafactor:results
  everett loss_vs_size figure_2_adam:results figure_3_sgd:results figure_3_param_scaling:results
  everett alignment figure_1_5_6_7_alignment:probes
  if [ "$preset" = _desktop ]; then  # which Figure 4 does not have
    everett epsilon figure_8_mitigations:results
  else
    everett epsilon figure_4_epsilon:results figure_8_mitigations:results
  fi
  everett weight_decay figure_9_weight_decay:results figure_12_adam:results
  everett adafactor figure_10_adafactor:results
  everett depth depth:results
  echo "figures, findings and Table 4: $out"
}

# Curves of these train for 20 tokens per parameter, on more of the same text.
growing="nanolm_c4/figure_9_weight_decay nanolm_c4/figure_11_sgd nanolm_c4/figure_12_adam
  nanolm_c4/figure_13_adafactor"

# The text is tokenised once, before workers ask for it.
prepare() {
  local config=paper
  [ -z "$(preset "$@")" ] || config=everett_laptop
  python -m nanolm_c4.data "nanolm_c4/configs/$config.yaml" >/dev/null
  if [ $config = paper ] && [ -n "$(chosen "$growing")" ]; then
    python -m nanolm_c4.data nanolm_c4/configs/paper.yaml \
      data.max_train_tokens=77_000_000_000 >/dev/null
  fi
}

if [ "${1:-}" = prepare ]; then
  check_only "${stages[@]}"
  prepare "${@:2}"
else
  dispatch nanolm_c4.train nanolm_c4/configs/paper.yaml "$@"
fi
