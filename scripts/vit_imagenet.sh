#!/usr/bin/env bash
# ViT-B on ImageNet as in Dinan, Yaida & Zhang (Part II) on GPU nodes, after bash scripts/download.sh
# imagenet, or give data.source and data.path (vit_imagenet/README.md).
#
# One run, configs/paper.yaml with key=value changes, on this node's GPUS (8), or on NODES nodes,
# called on every one of them with its rank and the first one's address:
#   bash scripts/vit_imagenet.sh
#   bash scripts/vit_imagenet.sh prescription.strategy=standard optimizer.lr=1e-3 optimizer.weight_decay=0.8
#   NODES=2 NODE=0 FIRST_NODE=10.0.0.1 bash scripts/vit_imagenet.sh
# The searches and seeds of Figures 1 and 2 and the best rates of several widths, each run on all GPUs
# of a node, then the figures. On SLURM, a sweep is a job with CPUS (15 for each GPU) cores on a node;
# options are those of sbatch, and after -- those of `python -m sweeps run`:
#   bash scripts/vit_imagenet.sh sweeps
#   bash scripts/vit_imagenet.sh slurm --partition gpu --nodes 4 --time 2-0
#   bash scripts/vit_imagenet.sh draw         # what is done so far
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

stages=("vit_imagenet/figure_1_2 vit_imagenet/rate_transfer")

figures() {
  local preset results transfer
  preset=$(preset "$@")
  results=results/vit_imagenet/figure_1_2$preset transfer=results/vit_imagenet/rate_transfer$preset
  for figure in vit_search vit_strategies; do
    draw "$results" "dinan/$figure" "$results/results.csv" "$results/metrics.csv"
  done
  draw "$transfer" dinan/rate_transfer "$transfer/results.csv"
  echo "figures and findings: $results $transfer"
}

# A batch of 4,096 images is spread over all GPUs of a node; the laptop's runs need none.
whole_node=(--launch "$(launcher one_node_8gpu) --main_process_port 0")
job=(--gpus-per-node "${GPUS:-8}" --cpus-per-task "${CPUS:-$((${GPUS:-8} * 15))}")
[ -z "$(preset "$@")" ] || whole_node=() job=()

dispatch vit_imagenet.train vit_imagenet/configs/paper.yaml "$@"
