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

# option "NAME ..." [WORD ...]: the value of the last of these options, --name VALUE or --name=VALUE.
option() {
  local names=" $1 " value=
  shift
  while [ "$#" -gt 0 ]; do
    if [[ "$names" == *" ${1%%=*} "* ]]; then
      if [[ "$1" == *=* ]]; then value=${1#*=}; else value=${2:-}; fi
    fi
    shift
  done
  echo "$value"
}

# submit_sweeps [SBATCH_OPTION ...] [--dry-run] [--yes] [-- OPTION ...]: a SLURM job per sweep, each after
# all jobs of the stage before; options after -- are those of `python -m sweeps run`. The experiment's own
# `job` options go before, `whole_node` after. First it looks: data that are missing and runs that need
# more GPUs than a job has end it, and more than 1,000 GPU-hours want --yes. --dry-run prints the calls.
submit_sweeps() {
  local stage sweep number numbers wanted nodes gpus said hours code=0 dry= yes= before=() own=() look=()
  check_options "$@"
  wanted=" $(having "$(preset "$@")" $(chosen "${stages[*]}")) "
  own=(${job[@]+"${job[@]}"})
  while [[ "$#" -gt 0 && "$1" != -- ]]; do
    case $1 in
      --dry-run) dry=1 ;;
      --yes) yes=1 ;;
      *) own+=("$1") ;;
    esac
    shift
  done
  nodes=$(option "--nodes -N" ${own[@]+"${own[@]}"})
  gpus=$(option "--gpus-per-node" ${own[@]+"${own[@]}"})
  gpus=${gpus##*:}  # of a100:8
  if [ -n "$gpus" ]; then
    look=(--gpus "$((${nodes:-1} * gpus))")
    # Processes that read data, beside those that train; SLURM's default is one core.
    [ -n "$(option "--cpus-per-task -c" "${own[@]}")" ] || own+=(--cpus-per-task "$((8 * gpus))")
  fi
  said=$(run_sweeps --dry-run --strict ${look[@]+"${look[@]}"} "${@:2}") || code=$?
  said=$(total <<<"$said")
  [ -z "$said" ] || echo "$said"
  if [ "$code" -ne 0 ] && [ -z "$dry" ]; then
    echo "error: nothing was submitted" >&2
    return 2
  fi
  hours=$(sed -n '$s/.*about \([0-9,]*\) [^ ]*-hours.*/\1/p' <<<"$said" | tr -d ,)
  if [ "${hours:-0}" -gt 1000 ] && [ -z "$dry$yes" ]; then
    echo "error: $hours GPU-hours: nothing was submitted; --yes does, --dry-run prints the calls of sbatch" >&2
    return 2
  fi
  for stage in "${stages[@]}"; do
    numbers=
    for sweep in $(chosen "$stage"); do
      [[ "$wanted" == *" $sweep "* ]] || continue
      local call=(sbatch --parsable --job-name "$sweep" ${before[@]+"${before[@]}"} ${own[@]+"${own[@]}"}
        scripts/slurm/sweep.sh $(arguments "$sweep") ${whole_node[@]+"${whole_node[@]}"} "${@:2}")
      if [ -n "$dry" ]; then
        printf '%q ' "${call[@]}"
        echo
        numbers+=":JOB-OF-$sweep"
        continue
      fi
      number=$("${call[@]}") || return
      echo "job ${number%%;*}: $sweep"
      numbers+=:${number%%;*}
    done
    [ -z "$numbers" ] || before=(--dependency "afterany$numbers")
  done
  return "$code"
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

# look [OPTION ...]: ends the script before anything is started if data or GPUs are missing.
look() {
  ${each:-} run_sweeps --dry-run --strict "$@" >/dev/null || {
    echo "error: nothing was started" >&2
    exit 2
  }
}

# sweep_and_draw [OPTION ...]: all of it here, after a look and the script's `prepare` if it has one;
# with --dry-run only what would be run.
sweep_and_draw() {
  check_only "${stages[@]}"
  check_options "$@"
  if [[ " $* " == *" --dry-run "* ]]; then
    run_sweeps "$@" | total
    return "${PIPESTATUS[0]}"
  fi
  look "$@"
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
