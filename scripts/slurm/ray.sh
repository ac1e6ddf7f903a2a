#!/usr/bin/env bash
# A sweep or search on a Ray cluster inside one SLURM job; arguments go to `python -m sweeps run`:
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 --time 12:00:00 --requeue \
#     --signal=B:TERM@180 scripts/slurm/ray.sh nanolm_c4/sweeps/figure_12_adam.yaml --gpu H100
# Three minutes before the time limit the driver is stopped: its runs save, the job is requeued and
# they resume. Runs of any size share the nodes; more nodes can join from other jobs, see below.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
. scripts/environment.sh

# Whoever has the token may run code on the cluster: it is in no file and on no command line.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
nodes=$SLURM_JOB_NUM_NODES
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node do not meet
share=(${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --ntasks-per-node=1)

srun --nodes=1 --ntasks=1 --nodelist="$first" "${share[@]}" \
  ray start --head --port="$port" --block &
if [ "$nodes" -gt 1 ]; then
  # With the token in its environment a node of any other job joins by the same command.
  srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$first" "${share[@]}" \
    sh -c 'until ray status --address "$0" >/dev/null 2>&1; do sleep 2; done
      exec ray start --address "$0" --block' "$first:$port" &
fi
trap 'kill $(jobs -p) 2>/dev/null' EXIT
until ray status --address "$first:$port" >/dev/null 2>&1; do sleep 2; done

warned=
python -m sweeps run "$@" --engine ray --address "$first:$port" &
driver=$!
trap 'warned=1; kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do # a signal has ended the wait and not the driver
  code=0
  wait "$driver" || code=$?
done
if [ -n "$warned" ] && [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
