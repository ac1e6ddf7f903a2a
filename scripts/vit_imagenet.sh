#!/usr/bin/env bash
# ViT-B on ImageNet as in Dinan, Yaida & Zhang (Part II) on GPU nodes. data/imagenet must hold
# train/CLASS/*.JPEG and val/CLASS/*.JPEG, or give data.source, data.path (vit_imagenet/README.md).
#
# One run, configs/paper.yaml with key=value changes, on this node's GPUS (8):
#   bash scripts/vit_imagenet.sh
#   bash scripts/vit_imagenet.sh prescription.strategy=standard optimizer.lr=1e-3 optimizer.weight_decay=0.8
# on NODES nodes, called on every one of them with its rank and the first one's address:
#   NODES=2 NODE=0 FIRST_NODE=10.0.0.1 bash scripts/vit_imagenet.sh
# The searches and seeds of Figures 1 and 2, one run on all GPUs of this node at a time, then the
# figures. On SLURM, a run is a job on a node with CPUS cores, JOBS of them at a time, further
# arguments as for `python -m sweeps submit`; `search` draws when they are done:
#   bash scripts/vit_imagenet.sh search
#   bash scripts/vit_imagenet.sh slurm --partition gpu
set -euo pipefail
. "$(dirname "$0")/environment.sh"

gpus=${GPUS:-8}
sweep=vit_imagenet/sweeps/figure_1_2.yaml
results=results/vit_imagenet/figure_1_2
launch=(accelerate launch --config_file scripts/accelerate/one_node_8gpu.yaml --num_processes "$gpus")

case ${1:-run} in
  search)
    python -m sweeps run "$sweep" --launch "${launch[*]} --main_process_port 0" "${@:2}"
    [ -f "$results/metrics.csv" ] || exit 0 # --dry-run
    for figure in vit_search vit_strategies; do
      python -m plots "dinan/$figure" "$results/results.csv" "$results/metrics.csv" --out "$results"
    done
    ;;
  slurm)
    python -m sweeps submit "$sweep" --engine slurm --jobs "${JOBS:-4}" --time 24:00:00 \
      --gpus-per-node "$gpus" --cpus-per-task "${CPUS:-$((gpus * 15))}" \
      --launch "${launch[*]} --main_process_port 0" "${@:2}"
    ;;
  *)
    [ "${1:-}" = run ] && shift
    nodes=${NODES:-1}
    if [ "$nodes" -gt 1 ]; then
      : "${NODE:?the rank of this node, from 0}" "${FIRST_NODE:?the address of the first node}"
      launch=(accelerate launch --config_file scripts/accelerate/several_nodes.yaml
        --num_machines "$nodes" --num_processes "$((nodes * gpus))"
        --machine_rank "$NODE" --main_process_ip "$FIRST_NODE")
    fi
    exec "${launch[@]}" -m vit_imagenet.train vit_imagenet/configs/paper.yaml "$@"
    ;;
esac
