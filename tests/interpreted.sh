#!/usr/bin/env bash
# `make test-kernels`: run the kernels' tests under Triton's interpreter, with Triton and NVRTC outside .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
site=.tools/triton
mapfile -t pins < <(grep -oE '^(triton|cuda-bindings|cuda-pathfinder|nvidia-cuda-nvrtc)==[0-9.]+' locks/trainer.cuda.txt)
[ "$(cat "$site/pins" 2>/dev/null)" = "${pins[*]}" ] || {
    rm -rf "$site"
    uv pip install --quiet --no-deps --python .venv/bin/python --target "$site" "${pins[@]}"
    echo "${pins[*]}" >"$site/pins"
}
PYTHONPATH=$site python -c "import triton" # otherwise its tests would be skipped
TRITON_INTERPRET=1 PYTHONPATH=$site pytest "$@" -o cache_dir=.pytest_cache/interpreted \
    tests/kernels/test_kernels_{adapted_matmul,expert_rows,fp8,grouped_matmul,sparse_attention,token_logprob}.py \
    tests/wire/test_wire_slice_fingerprints.py
LD_LIBRARY_PATH=$site/nvidia/cu13/lib PYTHONPATH=$site pytest -q tests/kernels/test_kernels_compiled.py -o cache_dir=.pytest_cache/interpreted
