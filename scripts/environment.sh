# Sourced by the other scripts: enters the repository, makes .venv if needed and activates it.
# PYTHON=/path/to/python chooses the interpreter (3.11 or 3.12). Nothing is installed for --help, which
# before that prints the calling script's first lines.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usable() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; }

# What is installed: the requirements, and where torch is from, which an environment keeps.
stamp=.venv/requirements.installed
torch=${UV_TORCH_BACKEND:-$(sed -n 's/^# torch: //p' "$stamp" 2>/dev/null || true)}
wanted=requirements.lock
[ -z "$torch" ] || wanted=requirements.txt
needed() { cat "$wanted" && { [ -z "$torch" ] || echo "# torch: $torch"; }; }

if ! needed | cmp -s - "$stamp" && [[ " $* " =~ \ (-h|--help)\  ]]; then
  sed -n '1d; /^#/!q; s/^# \{0,1\}//p' "scripts/$(basename "${CALLED_AS:-$0}")"
  printf '\n%s\n' "A call without --help installs .venv (several GB) first; then --help lists all options."
  exit
fi

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

# Install again only when the lock file has changed since the last complete installation. Every file
# must have a hash in the lock and be a wheel, which runs no code when installed. The exception is
# antlr4-python3-runtime, which fairseq's hydra needs and which is published as source only; it is
# built with the lock's setuptools, installed before. uv is used if it can be installed, as it is
# several times faster than pip; PIP_INDEX_URL applies to both. UV_TORCH_BACKEND=cpu (or cu128, ...)
# takes torch from PyTorch's own index, whose files are not in the lock: versions are then those of
# requirements.txt, and no hash is checked. Where Python may not write bytecode, as in many
# containers, it is compiled here once; otherwise every process compiles torch again, in 1.5 s.
if ! needed | cmp -s - "$stamp"; then
  echo "installing $wanted (several GB the first time)" >&2
  sed -n '/^uv==/,/[^\\]$/p; /^setuptools==/,/[^\\]$/p' requirements.lock >.venv/first.lock
  wheels="--only-binary :all: --no-binary antlr4-python3-runtime"
  checked=--require-hashes
  [ "$wanted" = requirements.lock ] || checked=
  compiled=${PYTHONDONTWRITEBYTECODE:+--compile-bytecode}
  [ -z "$torch" ] || export UV_TORCH_BACKEND="$torch"
  if .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
    --only-binary :all: --no-deps -r .venv/first.lock 2>/dev/null &&
    UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-https://pypi.org/simple}}" \
      .venv/bin/uv pip install --python .venv/bin/python $checked $compiled $wheels \
      --no-build-isolation-package antlr4-python3-runtime -r "$wanted"; then
    :
  elif [ "$wanted" = requirements.lock ]; then
    echo "uv could not; installing with pip" >&2
    sed -n '/^setuptools==/,/[^\\]$/p' requirements.lock >.venv/first.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
      --only-binary :all: --no-deps -r .venv/first.lock
    .venv/bin/python -m pip install --progress-bar on --disable-pip-version-check \
      --require-hashes $wheels --no-build-isolation -r requirements.lock
  else
    echo "error: uv could not install $wanted with UV_TORCH_BACKEND=$torch" >&2
    exit 2
  fi
  needed >"$stamp"
fi
. .venv/bin/activate
