#!/usr/bin/env bash
# Writes requirements.lock anew: the whole environment of requirements.txt for Python 3.11 and 3.12 on
# Linux and macOS, every file with its SHA-256. Versions stay as they are unless requirements.txt asks
# for another or an argument says so:
#   bash scripts/lock.sh                              # after a change of requirements.txt
#   bash scripts/lock.sh --upgrade-package pillow     # one package's newest version that fits
#   bash scripts/lock.sh --upgrade                    # all that requirements.txt does not pin
set -euo pipefail
case ${1:-} in -h | --help) sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "$0"; exit ;; esac
. "$(dirname "$0")/environment.sh"
uv pip compile requirements.txt --output-file requirements.lock --universal --python-version 3.11 \
  --generate-hashes --no-emit-index-url --quiet \
  --custom-compile-command "bash scripts/lock.sh" "$@"
