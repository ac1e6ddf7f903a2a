#!/usr/bin/env bash
# Redraws every shipped figure from the tables in plots/data into plots/figures; its findings are printed and kept in plots/findings.
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
. "$(dirname "$0")/environment.sh"

python -m plots --all
