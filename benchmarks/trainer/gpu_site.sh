#!/usr/bin/env bash
# Wheels that `python -m orrery.trainer.bench` needs on a GPU host which has torch but no network: into .whl/ of the checkout.
# There: pip install --no-index --no-deps --target /tmp/site .whl/*.whl, and PYTHONPATH=/tmp/site and packages/*/src (session.sh does it).
# With `peer` as an argument: torchtitan and what it needs beside torch, into .whl_titan/.
set -euo pipefail
cd "$(dirname "$0")/../.."

ours=(pydantic pydantic-core annotated-types typing-extensions typing-inspection psutil msgspec pyzmq gojsonnet nvidia-cudnn-frontend)
peer=(torchtitan==0.2.2 torchdata datasets dill multiprocess tyro docstring-parser typeguard tomli)

locked() { grep -hoE -m 1 "^$1==[^ ]+" locks/cpu.txt locks/trainer.cuda.txt | head -n 1; }  # the versions that the rest is tested with

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

if [ "${1:-}" = peer ]; then fetch .whl_titan "${peer[@]}"; else fetch .whl $(for name in "${ours[@]}"; do locked "$name"; done); fi
