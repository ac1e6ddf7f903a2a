# Sourced by the other scripts: enters the repository, makes .venv if needed and activates it.
# PYTHON=/path/to/python chooses the interpreter (3.11 or 3.12).
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usable() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

if [ ! -x .venv/bin/python ]; then
  if [ -n "${PYTHON:-}" ] && ! usable "$PYTHON"; then
    echo "error: PYTHON=$PYTHON is not Python 3.11 or 3.12" >&2
    exit 2
  fi
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python; do
    if usable "$candidate"; then chosen=$candidate; break; fi
  done
  if [ -z "${chosen:-}" ]; then
    echo "error: no Python 3.11 or 3.12 found; install one or set PYTHON=/path/to/python" >&2
    exit 2
  fi
  echo "making .venv with $("$chosen" --version)" >&2
  # A half-made environment would be taken for a whole one the next time.
  "$chosen" -m venv .venv && .venv/bin/python -c 'import pip' || { rm -rf .venv; exit 2; }
fi

# Install again only when requirements.txt has changed since the last time it was installed whole.
stamp=.venv/requirements.installed
if ! cmp -s requirements.txt "$stamp"; then
  echo "installing requirements.txt (several GB the first time)" >&2
  .venv/bin/python -m pip install --quiet --progress-bar on --disable-pip-version-check -r requirements.txt
  cp requirements.txt "$stamp"
fi
. .venv/bin/activate
