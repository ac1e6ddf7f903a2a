#!/usr/bin/env bash
# BART-large and R2C2 by span denoising as in Dinan, Yaida & Zhang (Part II) on GPU nodes, after bash
# scripts/download.sh bart, which makes data/bart of your text.
#
# One run of BART-large (DDP), with key=value changes, or of R2C2 (FSDP2), on this node's GPUS (8), or
# on NODES nodes, called on every one of them with its rank and the first one's address:
#   bash scripts/bart_span_denoise.sh
#   bash scripts/bart_span_denoise.sh prescription.strategy=neural_tangent optimizer.lr=32.768 \
#     optimizer.weight_decay=3.0517578125e-7
#   NODES=2 NODE=0 FIRST_NODE=10.0.0.1 bash scripts/bart_span_denoise.sh r2c2
# The runs of Figures 3, 4 and 5, each on all GPUs of a node, then the figures. Options are those
# of `python -m sweeps run` (--preset laptop; --engine ray). On SLURM, a sweep is a job with CPUS (5 for
# each GPU: itself and four that read its data) cores on a node; options are those of sbatch, and after
# -- those of `python -m sweeps run`:
#   bash scripts/bart_span_denoise.sh sweeps
#   bash scripts/bart_span_denoise.sh slurm --partition gpu --nodes 4 --time 2-0
#   bash scripts/bart_span_denoise.sh draw    # what is done so far
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

figures() {
  local preset results=results/bart_span_denoise
  preset=$(preset "$@")
  local out=$results/figure_3_4$preset
  local large=("$out/results.csv" "$out/metrics.csv")
  local r2c2=("$results/figure_5$preset/results.csv" "$results/figure_5$preset/metrics.csv")
  [ -e "${r2c2[1]}" ] || r2c2=()
  draw "$out" dinan/bart_rates "${large[@]}"
  draw "$out" dinan/bart_strategies "${large[@]}" ${r2c2[@]+"${r2c2[@]}"}
  echo "figures and findings: $out"
}

# each COMMAND [OPTION ...]: on all GPUs of a node, BART-large replicated and R2C2 sharded; the laptop's
# runs need none.
each() {
  local suffix code=0
  stages=("bart_span_denoise/figure_3_4 bart_span_denoise/figure_5")
  check_only "${stages[@]}"
  if [ -n "$(preset "$@")" ]; then
    "$@"
    return
  fi
  for suffix in "" _fsdp; do
    stages=(bart_span_denoise/figure_3_4)
    [ -z "$suffix" ] || stages=(bart_span_denoise/figure_5)
    job=(--gpus-per-node "${GPUS:-8}" --cpus-per-task "${CPUS:-$((${GPUS:-8} * 5))}")
    whole_node=(--launch "$(launcher "one_node_8gpu$suffix") --main_process_port 0")
    "$@" || code=$?
    # A dry run goes on to say what the other sweep would do.
    [[ "$code" -eq 0 || " $* " == *" --dry-run "* ]] || return "$code"
  done
  return "$code"
}

case ${1:-run} in
  sweeps)
    check_options "${@:2}"
    [[ " $* " == *" --dry-run "* ]] || each=each look "${@:2}"
    if [[ "$(preset "$@")" == _laptop && " $* " != *" --dry-run "* ]]; then
      python -m bart_span_denoise.data bart_span_denoise/configs/laptop.yaml >/dev/null
    fi
    each run_sweeps "${@:2}"
    [[ " $* " == *" --dry-run "* ]] || figures "${@:2}"
    ;;
  slurm) each submit_sweeps "${@:2}" ;;
  draw) figures "${@:2}" ;;
  r2c2) train bart_span_denoise.train bart_span_denoise/configs/r2c2.yaml _fsdp "${@:2}" ;;
  *)
    [ "${1:-}" != run ] || shift
    train bart_span_denoise.train bart_span_denoise/configs/bart_large.yaml "" "$@"
    ;;
esac
