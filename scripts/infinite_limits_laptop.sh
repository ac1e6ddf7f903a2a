#!/usr/bin/env bash
# Bordelon, Chaudhry & Pehlevan at the laptop presets: Vision Transformers on drawn images and a decoder
# on the World English Bible. Trains, draws and prints the findings; a second call reuses every run
# that is done, and the tables of networks at initialisation if all are there.
CALLED_AS=$0 exec bash "$(dirname "$0")/vit_cifar5m.sh" sweeps --preset laptop --workers 2 --threads 1 "$@"
