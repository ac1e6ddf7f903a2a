# Sourced by the scripts of the experiments: enters the environment and defines what they share.
#
# stages: the sweeps of an experiment, FOLDER/NAME or FOLDER/NAME:CURVE; those of one stage need only
# what stages before it found. ONLY="NAME NAME:CURVE ..." chooses among them.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# launcher CONFIG: accelerate on the GPUS (8) of this node.
launcher() {
  echo accelerate launch --config_file "scripts/accelerate/$1.yaml" --num_processes "${GPUS:-8}"
}

# train MODULE CONFIG SUFFIX [key=value ...]: one run, as _fsdp (SUFFIX) or else replicated, on this
# node or on NODES nodes, where it is called on every one with its NODE and the FIRST_NODE's address.
train() {
  local module=$1 config=$2 suffix=$3
  shift 3
  if [ "${NODES:-1}" -gt 1 ]; then
    : "${NODE:?the rank of this node, from 0}" "${FIRST_NODE:?the address of the first node}"
    exec $(launcher "several_nodes$suffix") --num_processes "$((NODES * ${GPUS:-8}))" \
      --num_machines "$NODES" --machine_rank "$NODE" --main_process_ip "$FIRST_NODE" \
      -m "$module" "$config" "$@"
  fi
  exec $(launcher "one_node_8gpu$suffix") -m "$module" "$config" "$@"
}

# chosen STAGE: its sweeps that ONLY names, all without ONLY.
chosen() {
  local sweep
  for sweep in $1; do
    [[ -z "${ONLY:-}" || " $ONLY " == *" ${sweep#*/} "* ]] && echo "$sweep"
  done
  return 0
}

# arguments SWEEP: its file, and its curve if one is named.
arguments() {
  local file=${1%%:*}
  echo "${file%/*}/sweeps/${file#*/}.yaml"
  [[ "$1" != *:* ]] || printf '%s\n' --curves "${1#*:}"
}

# run_sweeps [OPTION ...]: one after the other, with options of `python -m sweeps run`. One that fails
# ends it, but for a --dry-run, which says of each what data it misses.
run_sweeps() {
  local stage sweep code=0
  for stage in "${stages[@]}"; do
    for sweep in $(chosen "$stage"); do
      python -m sweeps run $(arguments "$sweep") "$@" || code=$?
      [[ $code == 0 || " $* " == *" --dry-run "* ]] || return "$code"
    done
  done
  return "$code"
}

# submit_sweeps [OPTION ...]: a small SLURM job per sweep that submits its runs with the GPUs that
# each needs, after all jobs of the stage before. Where one of those failed, it says what is missing.
submit_sweeps() {
  local stage sweep jobs after=()
  for stage in "${stages[@]}"; do
    jobs=
    for sweep in $(chosen "$stage"); do
      jobs+=:$(python -m sweeps submit $(arguments "$sweep") --engine slurm --jobs "${JOBS:-128}" \
        --time 12:00:00 "${after[@]}" "$@" | tee /dev/stderr | awk 'NR == 1 {print $2}')
    done
    [ -z "$jobs" ] || after=(--after "${jobs#:}")
  done
}

# preset [OPTION ...]: _NAME where the options hold --preset NAME, as in the names of results folders.
preset() {
  while [ "$#" -gt 0 ]; do
    case $1 in
      --preset) echo "_$2" ;;
      --preset=*) echo "_${1#*=}" ;;
    esac
    shift
  done
}

# sweep_and_draw [OPTION ...]: all of it here; with --dry-run only what would be run.
sweep_and_draw() {
  run_sweeps "$@"
  [[ " $* " == *" --dry-run "* ]] || figures "$@"
}

# draw OUT FIGURE TABLE ...: a figure into the folder OUT, its findings also into a file there; where
# a table is still missing it says so and goes on.
draw() {
  local out=$1 figure=$2 table
  shift 2
  for table in "$@"; do
    if [ ! -e "$table" ]; then
      echo "$figure not drawn: $table is not there yet" >&2
      return
    fi
  done
  mkdir -p "$out"
  python -m plots "$figure" "$@" --out "$out" | tee "$out/${figure#*/}.txt"
}
