#!/usr/bin/env bash
# A sweep or search as one SLURM job; the words after the script go to `python -m sweeps run`:
#   sbatch --gpus-per-node 8 --cpus-per-task 64 --time 12:00:00 scripts/slurm/sweep.sh SWEEP.yaml
#   sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 --time 2-0 scripts/slurm/sweep.sh SWEEP.yaml
# On one node the runs share its GPUs (--engine local); over several a Ray cluster is started. Three
# minutes before the time limit the runs save, the job is requeued and they resume. After SIGTERM
# (preemption, scancel) they save, too, and SLURM decides whether the job starts again.
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
#SBATCH --open-mode=append
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
. scripts/environment.sh

nodes=${SLURM_JOB_NUM_NODES:-1}
where=(--engine local)
if [ "$nodes" -gt 1 ]; then
  # Whoever has the token may run code on the cluster: it is in no file and on no command line.
  RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
  export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
  first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
  address=$first:$((20000 + SLURM_JOB_ID % 20000)) # jobs that share a node do not meet
  share=(${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} --ntasks-per-node=1)
  trap 'kill $(jobs -p) 2>/dev/null' EXIT
  srun --nodes=1 --ntasks=1 --nodelist="$first" "${share[@]}" \
    ray start --head --port="${address#*:}" --block &
  # With the token in its environment a node of any other job joins by the same command.
  srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$first" "${share[@]}" \
    sh -c 'until ray status --address "$0" >/dev/null 2>&1; do sleep 2; done
      exec ray start --address "$0" --block' "$address" &
  until ray status --address "$address" >/dev/null 2>&1; do sleep 2; done
  where=(--engine ray --address "$address")
fi

warned='' stopped='' driver=''
stop() {
  stopped=1
  [ -z "$driver" ] || kill -TERM "$driver"
}
trap 'warned=1; stop' USR1
trap stop TERM
python -m sweeps run "$@" "${where[@]}" & driver=$!
[ -z "$stopped" ] || stop # the signal came before the driver was known
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do # a signal has ended the wait and not the driver
  code=0
  wait "$driver" || code=$?
done
if [ -n "$warned" ] && [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
