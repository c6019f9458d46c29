#!/usr/bin/env bash
# Makes a virtual environment with the compilers of TPUs and GPUs, which need neither (sharding/compile.py uses them):
#
#     scripts/compilers.sh 0.12.0.1 ~/compilers/0.12     # a version of jax, and a folder; about 2 GB
#     JAXINFER_COMPILERS=~/compilers/0.12 scripts/test tests/sharding
#
# Does nothing where the folder has them already. Versions are pinned, so that a compile tomorrow is the one of today.
set -euo pipefail
if [ $# -ne 2 ]; then
  echo "usage: $0 JAX_VERSION FOLDER" >&2
  exit 2
fi
version=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
source scripts/environment.sh

libtpu=0.0.52
nvcc=12.9.86
flax=0.12.12  # jaxinfer's models are Flax modules
numpy=2.5.5
wanted="jax $version libtpu $libtpu nvcc $nvcc flax $flax numpy $numpy"
if [ "$(cat "$folder/.compilers" 2>/dev/null)" = "$wanted" ]; then
  echo "$folder has the compilers of jax $version."
  exit
fi

install() {
  "$folder/bin/python" -m pip install --disable-pip-version-check --progress-bar off --quiet "$@"
}

if [ ! -x "$folder/bin/python" ]; then
  if python=$(newest_python); then
    echo "Making $folder with $("$python" --version) ..."
    "$python" -m venv "$folder"
  elif command -v uv >/dev/null; then
    echo "Making $folder with uv ..."
    uv venv --seed --python 3.12 "$folder"
  else
    echo "The compilers need Python 3.12 or later, or uv." >&2
    exit 1
  fi
fi
echo "Installing jax $version and the TPU compiler ..."
install "jax==$version" "jaxlib==$version" "libtpu==$libtpu" "flax==$flax" "numpy==$numpy"
echo "Installing the GPU compiler ..."
# Without what they depend on: gigabytes of CUDA libraries that only running needs.
install --no-deps "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version" "nvidia-cuda-nvcc-cu12==$nvcc"
echo "$wanted" >"$folder/.compilers"
echo "$folder has the compilers of jax $version."
