#!/usr/bin/env bash
# Every figure and table of "Scaling Exponents Across Parameterizations and Optimizers" at the
# laptop preset: trains, draws and prints the findings. A second call reuses every run that is done.
CALLED_AS=$0 exec bash "$(dirname "$0")/nanolm_c4.sh" sweeps --preset laptop --workers 2 --threads 1 "$@"
