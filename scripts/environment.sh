# Sourced by demo and test: a virtual environment in .venv with jaxinfer and what $1 (an extra, or nothing) adds.
# Needs bash and Python 3.12 or later, by any of its usual names, or uv.

newest_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
      command -v "$name"
      return
    fi
  done
  # pyenv keeps versions that its shims do not show.
  for name in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
    if [ -x "$name" ] && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
      echo "$name"
      return
    fi
  done
  return 1
}

make_environment() {
  local extra=${1:-} python wanted
  wanted=$(cat pyproject.toml constraints.txt | cksum)
  if [ ! -x .venv/bin/python ]; then
    if python=$(newest_python); then
      echo "Making .venv with $("$python" --version) ..."
      if ! "$python" -m venv .venv; then
        echo "This Python cannot make virtual environments; on Debian or Ubuntu install python3-venv." >&2
        return 1
      fi
    elif command -v uv >/dev/null; then
      echo "Making .venv with uv ..."
      uv venv --seed --python 3.12 .venv
    else
      echo "jaxinfer needs Python 3.12 or later, and found only: $(python3 --version 2>&1)." >&2
      echo "Install it (python.org, pyenv, your system's packages) or uv, and run this again." >&2
      return 1
    fi
  fi
  if [ "$(cat .venv/.jaxinfer-"${extra:-base}" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing jaxinfer${extra:+ with $extra} (about 600 MB the first time) ..."
    .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet \
      --constraint constraints.txt --editable ".${extra:+[$extra]}"
    echo "$wanted" >.venv/.jaxinfer-"${extra:-base}"
  fi
}
