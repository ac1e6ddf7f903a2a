#!/usr/bin/env bash
# Figures 3 and 4 of Dinan, Yaida & Zhang (Part II) at the laptop preset: a narrow BART by span
# denoising on the embedded corpus, two strategies over learning rates at two widths. Trains, draws
# and prints the findings; a second call reuses every run that is done.
export ONLY=figure_3_4
exec bash "$(dirname "$0")/bart_span_denoise.sh" sweeps --preset laptop --workers 2 --threads 1
