#!/usr/bin/env bash
# `make test-cuda-setup`: set up a clone of HEAD from the CUDA lock, on a machine with or without GPUs. About
# 6 GB of downloads and 11 GB of disk, so CI leaves it out.
# - Every package of the lock is installed with its hash; every module of ours and of the GPU's packages
#   imports. Without a driver, a module that links against it does not, and is named.
# - `orrery check` and `orrery plan` work, and the demo's weights are written without a network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

clone=$(mktemp -d "${TMPDIR:-/var/tmp}/orrery-cuda.XXXXXX")
trap 'rm -rf "$clone"' EXIT
git clone --quiet . "$clone"
cd "$clone"
# The environment of the checkout is not this one's.
export PATH=/usr/local/bin:/usr/bin:/bin HARDWARE=
make setup HARDWARE=cuda
.venv/bin/python -W ignore - <<'PYTHON'
"""Compare what is installed with the lock, and import every module."""
import importlib, importlib.metadata, pathlib, pkgutil, re

text = pathlib.Path("locks/cuda.txt").read_text()
locked = dict(re.findall(r"(?m)^([a-z0-9._-]+)==([^\s;\\]+)", text))
wrong = [f"{name}: {found}, locked {version}" for name, version in locked.items() if (found := importlib.metadata.version(name)) != version]
assert not wrong, wrong
import orrery

ours = [one.name for one in pkgutil.walk_packages(orrery.__path__, "orrery.") if not one.name.endswith("__main__")]
theirs = "torch vllm transformers flash_attn.cute cudnn nixl mooncake.engine triton snakemake gguf math_verify pyarrow huggingface_hub".split()
for name in [*theirs, *ours]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert "libcuda.so.1" in str(error), f"{name}: {error}"
        print(f"{name} needs a driver: {error}")
print(f"{len(locked)} packages as locked, {len(ours)} modules of orrery import")
PYTHON
.venv/bin/orrery check >/dev/null
.venv/bin/orrery plan smollm2_demo
make weights/SmolLM2-135M-Instruct/config.json
echo "test-cuda-setup: passed at $(git rev-parse HEAD)"
