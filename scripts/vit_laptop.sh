#!/usr/bin/env bash
# Figures 1 and 2 of Dinan, Yaida & Zhang (Part II) at the laptop preset: a small Vision Transformer on
# handwritten digits, four scaling strategies, each with its own search over learning rate and weight
# decay; then their best rates at three widths, on drawn images. Trains, draws and prints the findings;
# a second call reuses every run that is done.
CALLED_AS=$0 exec bash "$(dirname "$0")/vit_imagenet.sh" sweeps --preset laptop --workers 2 --threads 1 "$@"
