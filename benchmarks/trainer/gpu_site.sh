#!/usr/bin/env bash
# Wheels that `python -m orrery.trainer.bench` needs on a GPU host which has torch but no network: into .whl/ of the checkout.
# There: pip install --no-index --no-deps --target /tmp/site .whl/*.whl, and PYTHONPATH=/tmp/site and packages/*/src (session.sh does it).
# With `peer` as an argument: torchtitan and what it needs beside torch, into .whl_titan/. With `flash`: FlashAttention 4, into .whl_flash/
# (100 MB), whose compiler stands in /tmp/site/nvidia_cutlass_dsl/dsl_packages, which PYTHONPATH has to name too.
set -euo pipefail
cd "$(dirname "$0")/../.."

ours=(pydantic pydantic-core annotated-types typing-extensions typing-inspection psutil msgspec pyzmq gojsonnet nvidia-cudnn-frontend)
peer=(torchtitan==0.2.2 torchdata datasets dill multiprocess tyro docstring-parser typeguard tomli)
flash=(flash-attn-4 apache-tvm-ffi einops nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core
       nvidia-cutlass-dsl-libs-cu13 protobuf quack-kernels torch-c-dlpack-ext)

locked() { # NAME LOCK …: the version that the rest is tested with
  local name=$1
  shift
  grep -hoE -m 1 "^$name==[^ ]+" "$@" | head -n 1
}

fetch() {
  local folder=$1; shift
  mkdir -p "$folder"
  local platforms=() n
  for n in 39 38 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
  platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  for name in "$@"; do
    python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$folder" "$name"
  done
  du -sh "$folder"
}

case ${1:-} in
  peer) fetch .whl_titan "${peer[@]}" ;;
  flash) fetch .whl_flash $(for name in "${flash[@]}"; do locked "$name" locks/trainer.cuda.txt; done) ;;
  *) fetch .whl $(for name in "${ours[@]}"; do locked "$name" locks/cpu.txt locks/trainer.cuda.txt; done) ;;
esac
