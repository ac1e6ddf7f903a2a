#!/usr/bin/env bash
# The quickstart's question on C4 with one GPU of 16 GB or more: decoders of width 128 to 1,024, standard
# and muP, 40 runs of 5,000 steps; more where the best rate lies at an edge. From an empty machine to the
# figure: it installs .venv, says what follows, fetches 1 GB of C4, tokenises it, trains and draws. A second
# call goes on where the first one was stopped. Options are those of `python -m sweeps run`.
#
# The 40 runs take 1.4 hours of an H100, 8.4 of an RTX 4090, 12 of an L4 and 22 of
# a T4, which has no bf16 and trains in fp16. So says `sweeps cost`, at 40 % of a card's peak.
set -euo pipefail
. "$(dirname "$0")/experiment.sh"

file=nanolm_c4/sweeps/quickstart.yaml results=results/nanolm_c4/quickstart_one_gpu precision=()
check_options "$@"
if ! capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null); then
  [[ " $* " == *" --dry-run "* ]] || { echo "error: no NVIDIA GPU here (nvidia-smi); --dry-run needs none" >&2; exit 2; }
elif [ "${capability%%.*}" -lt 8 ]; then
  precision=(training.precision=fp16) results+=+training.precision=fp16
fi
sweep=("$file" --preset one_gpu ${precision[@]+"${precision[@]}"})
if [[ " $* " != *" --dry-run "* ]]; then
  python -m sweeps cost "${sweep[@]}"
  bash scripts/download.sh c4 --shards 2
  python -m nanolm_c4.data nanolm_c4/configs/paper.yaml data.max_train_tokens=164_000_000 >/dev/null
fi
python -m sweeps run "${sweep[@]}" "$@"
[[ " $* " == *" --dry-run "* ]] || python -m plots quickstart "$results/results.csv" --out "$results"
