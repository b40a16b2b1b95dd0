# Sourced by flax_examples/run and tests/run, from the repository root: `ensure_venv EXTRAS` makes .venv hold this
# package (editable) with those extras and sets PYTHON. It installs again only when pyproject.toml or the extras change.

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
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --editable ".[$extras]" || return 1
    cp pyproject.toml "$stamp"
  fi
}
