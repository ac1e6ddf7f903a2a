#!/usr/bin/env bash
# Figures 3 to 5 of Dinan, Yaida & Zhang (Part II) at the laptop preset: a narrow BART by span
# denoising on the embedded corpus, two strategies over learning rates at two widths, then R2C2's
# depth. Trains, draws and prints the findings; a second call reuses every run that is done.
CALLED_AS=$0 exec bash "$(dirname "$0")/bart_span_denoise.sh" sweeps --preset laptop --workers 2 --threads 1 "$@"
