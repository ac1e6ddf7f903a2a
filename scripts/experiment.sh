# Sourced by the scripts of the experiments: enters the environment and defines what they share.
#
# stages: the sweeps of an experiment, FOLDER/NAME or FOLDER/NAME:CURVE; those of one stage need only
# what stages before it found. ONLY="NAME NAME:CURVE ..." chooses among them.
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [ "${*: -1}" = --preset ]; then
  echo "error: --preset: expected the name of a preset of the sweeps, such as laptop" >&2
  exit 2
fi

# launcher CONFIG: accelerate on the GPUS (8) of this node.
launcher() {
  echo accelerate launch --config_file "scripts/accelerate/$1.yaml" --num_processes "${GPUS:-8}"
}

# train MODULE CONFIG SUFFIX [key=value ...]: one run, as _fsdp (SUFFIX) or else replicated, on this
# node or on NODES nodes, where it is called on every one with its NODE and the FIRST_NODE's address.
# Exit code 2 for another word: every process would refuse it, and their launcher end in a traceback.
train() {
  local module=$1 config=$2 suffix=$3
  shift 3
  if [[ "${1:--}" != -* && "$1" != *=* ]]; then
    echo "error: $1: neither a command of this script nor key=value; the first lines of $0 say what" \
      "it takes" >&2
    exit 2
  fi
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
  local sweep only=" ${ONLY:-} "
  only=${only//[[:space:]]/ }
  for sweep in $1; do
    [[ -z "${ONLY:-}" || "$only" == *" ${sweep#*/} "* ]] && echo "$sweep"
  done
  return 0
}

# having PRESET SWEEP ...: the sweeps whose file has the preset _NAME ("": all). If none has it, all
# sweeps, so that the first one reports which presets exist.
having() {
  local sweep found=()
  for sweep in "${@:2}"; do
    if [ -z "$1" ] || grep -qs "^  ${1#_}:" "$(arguments "$sweep" | head -n 1)"; then
      found+=("$sweep")
    fi
  done
  echo "${found[@]:-${@:2}}"
}

# check_only STAGE ...: exit code 2 for a name in ONLY that no stage has.
check_only() {
  local name sweep known=" "
  for sweep in $*; do known+="${sweep#*/} "; done
  for name in ${ONLY:-}; do
    if [[ "$known" != *" $name "* ]]; then
      echo "error: ONLY: no sweep $name here; there are:$known" >&2
      exit 2
    fi
  done
}

# arguments SWEEP: its file, and its curve if one is named.
arguments() {
  local file=${1%%:*}
  echo "${file%/*}/sweeps/${file#*/}.yaml"
  [[ "$1" != *:* ]] || printf '%s\n' --curves "${1#*:}"
}

# total: passes on what dry runs say; where they were several, their runs and times are added up below.
total() {
  awk '{ print; fflush() }
    / runs to do/ {
      sweeps++
      known += $2 ~ /^\(/ ? $3 : $2
      if (match($0, /up to [0-9]+/)) more += substr($0, RSTART + 6, RLENGTH - 6)
      time = $0; sub(/;.*/, "", time); sub(/.*, about /, "", time); gsub(/,/, "", time)
      words = split(time, word, " ")
      for (i = 1; i < words && word[i] != "on"; i += 2) {
        if (word[i + 1] ~ /-hours/) { hours += word[i]; card = word[i + 1] }
        else seconds += word[i] * unit[word[i + 1]]
      }
      if (sub(/.* on /, "", time)) cores = time
    }
    BEGIN { unit["s"] = 1; unit["min"] = 60; unit["h"] = 3600; unit["d"] = 86400 }
    END {
      if (sweeps < 2) exit
      printf "all %d sweeps: %d runs to do", sweeps, known
      if (more) printf " and up to %d more", more
      if (cores) printf ", about %.0f min on %s", seconds / 60, cores
      if (card) printf ", about %d %s", hours, card
      print ""
    }'
}

# run_sweeps [OPTION ...]: one after the other, with options of `python -m sweeps run`. One that fails
# ends it, but for a --dry-run, which says of each what data it misses.
run_sweeps() {
  local sweep code=0
  for sweep in $(having "$(preset "$@")" $(chosen "${stages[*]}")); do
    python -m sweeps run $(arguments "$sweep") ${whole_node[@]+"${whole_node[@]}"} "$@" || code=$?
    [[ $code == 0 || " $* " == *" --dry-run "* ]] || return "$code"
  done
  return "$code"
}

# submit_sweeps [SBATCH_OPTION ...] [-- OPTION ...]: a SLURM job per sweep, each after all jobs of the
# stage before; options after -- are those of `python -m sweeps run`. A sweep whose stage before has
# failed says what is missing. The experiment's own `job` options go before, `whole_node` after.
submit_sweeps() {
  local stage sweep number numbers wanted before=() own=()
  check_options "$@"
  wanted=" $(having "$(preset "$@")" $(chosen "${stages[*]}")) "
  while [[ "$#" -gt 0 && "$1" != -- ]]; do own+=("$1") && shift; done
  for stage in "${stages[@]}"; do
    numbers=
    for sweep in $(chosen "$stage"); do
      [[ "$wanted" == *" $sweep "* ]] || continue
      number=$(sbatch --parsable --job-name "$sweep" ${job[@]+"${job[@]}"} \
        ${before[@]+"${before[@]}"} ${own[@]+"${own[@]}"} scripts/slurm/sweep.sh \
        $(arguments "$sweep") ${whole_node[@]+"${whole_node[@]}"} "${@:2}") || return
      echo "job ${number%%;*}: $sweep"
      numbers+=:${number%%;*}
    done
    [ -z "$numbers" ] || before=(--dependency "afterany$numbers")
  done
}

# preset [OPTION ...]: _NAME where the options hold --preset NAME (the last, as for the sweeps), as in
# the names of results folders.
preset() {
  local name=
  while [ "$#" -gt 0 ]; do
    case $1 in
      --preset) name=_$2 ;;
      --preset=*) name=_${1#*=} ;;
    esac
    shift
  done
  echo "$name"
}

# check_options [OPTION ...]: exit code 2 for what would put tables where `figures` does not look; ends
# with the options' meanings for --help.
check_options() {
  local word before= key='^[a-z_0-9.]+=[^=]'
  for word in "$@"; do
    if [[ "$word" == --help || "$word" == -h ]]; then
      python -m sweeps run --help
      exit
    fi
    if [[ "$word" == --results* || ( "$word" =~ $key && "$before" != --where ) ]]; then
      echo "error: $word: changed sweeps have folders of their own, which these scripts neither" \
        "start from nor draw; give it to python -m sweeps run FILE" >&2
      exit 2
    fi
    before=$word
  done
}

# sweep_and_draw [OPTION ...]: all of it here, after the script's `prepare` if it has one; with
# --dry-run only what would be run.
sweep_and_draw() {
  check_only "${stages[@]}"
  check_options "$@"
  if [[ " $* " == *" --dry-run "* ]]; then
    run_sweeps "$@" | total
    return "${PIPESTATUS[0]}"
  fi
  ! declare -F prepare >/dev/null || prepare "$@"
  run_sweeps "$@"
  figures "$@"
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
  python -m plots "$figure" "$@" --out "$out" | tee "$out/${figure#*/}.txt" ||
    echo "$figure not drawn: its tables are not complete yet" >&2
}

# dispatch MODULE CONFIG [sweeps|slurm|draw|run] [OPTION ...]: what the words of a script ask for, of
# its stages and figures; without one of these words a run of CONFIG with key=value changes.
dispatch() {
  local module=$1 config=$2
  shift 2
  case ${1:-run} in
    sweeps) sweep_and_draw "${@:2}" ;;
    slurm)
      check_only "${stages[@]}"
      submit_sweeps "${@:2}"
      ;;
    draw) figures "${@:2}" ;;
    *)
      [ "${1:-}" != run ] || shift
      train "$module" "$config" "" "$@"
      ;;
  esac
}
