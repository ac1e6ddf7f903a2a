#!/usr/bin/env bash
# One run on every GPU of a SLURM job of several nodes: an `accelerate launch` per node. Runs whose
# `needs` in the sweep file have nodes above 1 are started by it; with another configuration:
#   python -m sweeps run SWEEP.yaml --engine slurm --time 24:00:00 \
#     --launch "bash scripts/slurm/several_nodes.sh scripts/accelerate/several_nodes.yaml"
# The job adds what to run; this script hands its input and output on.
set -euo pipefail

config=$1
shift
nodes=$SLURM_JOB_NUM_NODES
processes=$((nodes * ${SLURM_GPUS_ON_NODE:-8}))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 20000))
# The signals that SLURM may send to every process are the launcher's to answer: it ends our input.
# torchrun would kill what has not saved 30 seconds after SIGTERM, so it does not listen to it.
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGINT
# --overlap: the launcher's own step holds the first node.
exec srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  sh -c 'trap "" TERM USR2; exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' sh \
  --config_file "$config" --num_machines "$nodes" --num_processes "$processes" \
  --main_process_ip "$first" --main_process_port "$port" "$@"
