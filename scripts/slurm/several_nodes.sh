#!/usr/bin/env bash
# One run on every GPU of a SLURM job of several nodes: an `accelerate launch` on each of them.
#   sbatch --nodes 2 --gpus-per-node 8 --cpus-per-task 64 --signal=TERM@180 scripts/slurm/several_nodes.sh \
#     scripts/accelerate/several_nodes_fsdp.yaml -m nanolm_c4.train nanolm_c4/configs/paper.yaml [key=value ...]
# The words after the launch config go to `accelerate launch`. SLURM sends SIGTERM to all processes of
# the job three minutes before its time limit: those that train save, and the launchers wait for them.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
. scripts/environment.sh

config=$1
shift
nodes=$SLURM_JOB_NUM_NODES
processes=$((nodes * ${SLURM_GPUS_ON_NODE:-8}))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 20000))
# torchrun would kill what has not saved 30 seconds after SIGTERM, so it does not listen to it.
export TORCHELASTIC_SIGNALS_TO_HANDLE=SIGINT
exec srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  sh -c 'trap "" TERM; exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' sh \
  --config_file "$config" --num_machines "$nodes" --num_processes "$processes" \
  --main_process_ip "$first" --main_process_port "$port" "$@"
