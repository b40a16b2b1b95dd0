# Sourced by flax_examples/run, tests/run and .ci/blackwell, from the repository root: `ensure_venv EXTRAS` makes .venv
# hold this package (editable) with those extras and sets PYTHON. It installs again only when pyproject.toml or the extras
# change. `ensure_cuda_compiler` then adds what compiles for GPUs that are not there.

find_python() {
  local candidate
  for candidate in "${JAX_MLA_PYTHON:-}" python3 python3.11 python3.12 python3.13; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "jax_mla needs Python 3.11 to 3.13: none of python3, python3.11, python3.12, python3.13 is one" >&2
  return 1
}

ensure_venv() {
  local extras=$1 python stamp
  PYTHON=$PWD/.venv/bin/python
  stamp=$PWD/.venv/installed-$(echo "$extras" | tr ',' '-')
  if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then # absent, or left half made by an interrupt
    python=$(find_python) || return 1
    echo "making .venv with $("$python" --version)" >&2
    rm -rf .venv
    "$python" -m venv .venv || return 1
  fi
  if [ ! -f "$stamp" ] || ! cmp -s pyproject.toml "$stamp"; then
    echo "installing jax_mla[$extras] into .venv (a few minutes the first time)" >&2
    # Python compiles what is imported as it is, a small part of what is installed.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-compile --editable ".[$extras]" || return 1
    cp pyproject.toml "$stamp"
  fi
}

# Lowering for CUDA asks jax's plugin alone (8 MB), and compiling for a GPU that is not there the library it would load
# (135 MB), not the CUDA libraries that they would pull in. The library lies apart: beside jax, every process without a
# GPU that finds it complains of missing CUDA libraries.
ensure_cuda_compiler() {
  local version
  [ "$(uname -sm)" = "Linux x86_64" ] || return 0
  version=$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("jax"))')
  pip() { "$PYTHON" -m pip --quiet --disable-pip-version-check "$@"; }
  if ! pip show jax-cuda13-plugin 2>/dev/null; then
    pip install --no-compile --no-deps "jax-cuda13-plugin==$version" || echo "no jax-cuda13-plugin==$version" >&2
  fi
  if ! pip show jax-cuda13-pjrt 2>/dev/null && [ ! -d ".venv/pjrt/jax_cuda13_pjrt-$version.dist-info" ]; then
    rm -rf .venv/pjrt
    pip install --no-compile --no-deps --target .venv/pjrt "jax-cuda13-pjrt==$version" || echo "no jax-cuda13-pjrt==$version" >&2
  fi
}
