#!/usr/bin/env bash
# Redraws every shipped figure from the tables in plots/data into plots/figures and prints its findings.
set -euo pipefail
. "$(dirname "$0")/environment.sh"

python -m plots --all
