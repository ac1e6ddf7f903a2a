#!/usr/bin/env bash
# Fetches the data of the paper-size configs into data/, which may be a link to a larger disk, and
# checks it. Without names it says what there is, how large it is and how long it takes:
#   bash scripts/download.sh
#   bash scripts/download.sh c4 cifar5m
# The same command goes on where it was cut off, and later compares what is there with what came.
# ImageNet is unpacked from your own archives, BART's corpus made of your own text:
#   bash scripts/download.sh imagenet --archives FOLDER
#   bash scripts/download.sh bart --text FOLDER
set -euo pipefail
. "$(dirname "$0")/environment.sh"
exec python -m scripts.download "$@"
