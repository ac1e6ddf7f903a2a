#!/usr/bin/env bash
# What only a GPU can show, in 8 minutes: correctness, then speed, then presets of a sweep if named.
#   bash benchmarks/gpu.sh [--cpu] [--out DIR] [SWEEP.yaml PRESET ...]
# --cpu runs every part at tiny sizes without a GPU, to see that it starts; its times mean nothing.
# Each part writes JSON with card, versions and commit to DIR (default: benchmarks/results/gpu). On a GPU
# a part that would begin after 7 minutes is left out and named; presets run to their end, with results
# in DIR/sweeps. One failed check ends everything: times of wrong numbers are of no use.
set -euo pipefail
cd "$(dirname "$0")/.."
device=cuda out=benchmarks/results/gpu
while [[ ${1-} == --* ]]; do
  case $1 in
    --cpu) device=cpu && shift ;;
    --out) out=$2 && shift 2 ;;
    *) echo "error: unknown option $1; expected --cpu or --out DIR" >&2 && exit 2 ;;
  esac
done
if (($# == 1)); then
  echo "error: $1 needs the names of its presets" >&2 && exit 2
fi
mkdir -p "$out"
part() { # NAME MODULE ARGUMENT...
  local name=$1 module=$2
  shift 2
  if [[ $device == cuda ]] && ((SECONDS > 420)); then
    echo "$name: left out, 7 minutes are over" >&2
    return
  fi
  echo "$name, after $SECONDS s" >&2
  python -m "benchmarks.$module" --device "$device" "$@" --json "$out/$name.json" >/dev/null
}
if [[ $device == cuda ]]; then
  speed=(--modes bf16_compile --repeats 1 --steps 20 --warmup 8 --free 30)
  wide=1024 narrow=256 batch=32 large=64 vocabulary=50304 repeats=20
else
  speed=(--modes fp32 --repeats 1 --steps 2 --warmup 1 --free 2 --layers 2 --context 16 --head-dim 32)
  speed+=(--vocab 64)
  wide=64 narrow=32 batch=2 large=4 vocabulary=128 repeats=2
fi
part checks gpu
part optimizers optimizers --widths "$wide" --repeats "$repeats"
part throughput throughput "${speed[@]}" --widths "$narrow" "$wide" --batch "$batch"
part one_gpu throughput "${speed[@]}" --widths "$wide" --batch "$large" # preset one_gpu's batch
part muon throughput "${speed[@]}" --widths "$wide" --batch "$batch" --optimizer muon
part vocabulary throughput "${speed[@]}" --widths "$wide" --batch "$batch" --vocab "$vocabulary"
file=${1-}
for preset in "${@:2}"; do
  echo "$file $preset, after $SECONDS s" >&2
  python -m sweeps run "$file" --preset "$preset" --results "$out/sweeps"
done
echo "done after $SECONDS s: $out" >&2
