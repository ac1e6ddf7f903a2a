#!/usr/bin/env bash
# BART-large and R2C2 by span denoising as in Dinan, Yaida & Zhang (Part II) on GPU nodes. data/bart
# must hold a corpus of fairseq-preprocess and GPT-2's BPE files (bart_span_denoise/README.md).
#
# One run of BART-large (DDP) on this node's GPUS (8), with key=value changes; or of R2C2 (FSDP2):
#   bash scripts/bart_span_denoise.sh
#   bash scripts/bart_span_denoise.sh prescription.strategy=neural_tangent optimizer.lr=32.768 \
#     optimizer.weight_decay=3.0517578125e-7
#   bash scripts/bart_span_denoise.sh r2c2
# on NODES nodes, called on every one of them with its rank and the first one's address:
#   NODES=2 NODE=0 FIRST_NODE=10.0.0.1 bash scripts/bart_span_denoise.sh r2c2
# The runs of Figures 3, 4 and 5, one on all GPUs of this node at a time, then the figures:
#   bash scripts/bart_span_denoise.sh sweeps
set -euo pipefail
. "$(dirname "$0")/environment.sh"

gpus=${GPUS:-8}
results=results/bart_span_denoise
launch() { # launch ACCELERATE_CONFIG: the launcher on this node
  echo "accelerate launch --config_file scripts/accelerate/$1.yaml --num_processes $gpus" \
    "--main_process_port 0"
}

if [ "${1:-}" = sweeps ]; then
  if [ "$#" -gt 1 ] || [ "${NODES:-1}" -gt 1 ]; then
    echo "error: sweeps takes no further words and runs on one node; for more give the sweep files" \
      "in bart_span_denoise/sweeps to python -m sweeps run or submit" >&2
    exit 2
  fi
  sweeps=bart_span_denoise/sweeps
  python -m sweeps run $sweeps/figure_3_4.yaml --launch "$(launch one_node_8gpu)"
  python -m sweeps run $sweeps/figure_5.yaml --launch "$(launch one_node_8gpu_fsdp)"
  large=("$results/figure_3_4/results.csv" "$results/figure_3_4/metrics.csv")
  r2c2=("$results/figure_5/results.csv" "$results/figure_5/metrics.csv")
  python -m plots dinan/bart_rates "${large[@]}" --out "$results"
  python -m plots dinan/bart_strategies "${large[@]}" "${r2c2[@]}" --out "$results"
  exit
fi

model=bart_large
suffix=
if [ "${1:-}" = r2c2 ]; then
  model=r2c2
  suffix=_fsdp
  shift
fi
nodes=${NODES:-1}
command=(accelerate launch --config_file "scripts/accelerate/one_node_8gpu$suffix.yaml"
  --num_processes "$gpus")
if [ "$nodes" -gt 1 ]; then
  : "${NODE:?the rank of this node, from 0}" "${FIRST_NODE:?the address of the first node}"
  command=(accelerate launch --config_file "scripts/accelerate/several_nodes$suffix.yaml"
    --num_machines "$nodes" --num_processes "$((nodes * gpus))"
    --machine_rank "$NODE" --main_process_ip "$FIRST_NODE")
fi
exec "${command[@]}" -m bart_span_denoise.train "bart_span_denoise/configs/$model.yaml" "$@"
