#!/usr/bin/env bash
# `make test-cuda-images`: build the CUDA images, about 12 GB, and start each under Apptainer without a driver. CI leaves it out.
# - In each image the entry point of its role and the packages for GPUs import.
# - All shared libraries of the packages are found, except the driver's and those of optional parts.
# ORRERY_CUDA_IMAGES names a folder that keeps the images.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v apptainer >/dev/null || bash tests/cluster/install_apptainer.sh
images=${ORRERY_CUDA_IMAGES:-$(mktemp -d /var/tmp/orrery-cuda-images.XXXXXX)}
[ -n "${ORRERY_CUDA_IMAGES:-}" ] || trap 'rm -rf "$images"' EXIT
mkdir -p "$images"
snakemake -s pipelines/images.smk --cores all --config images="$images" --quiet rules -- cuda

modules() { # IMAGE: what must import there
    case $1 in
    orchestrator) echo orrery.orchestrator.__main__ orrery.observe.report ;;
    trainer) echo orrery.trainer.__main__ torch transformers triton ;;
    inference) echo orrery.inference.__main__ orrery.inference.server torch vllm nixl ;;
    esac
}
enter() { # FILE COMMAND...
    unshare --map-root-user --mount apptainer -s exec --cleanenv --no-home --no-mount home,tmp,cwd,hostfs,bind-paths --scratch /tmp \
        --bind "$PWD/packages:/orrery/code" --pwd / "$@"
}
for image in orchestrator trainer inference; do
    file=$(ls -t "$images/$image-cuda"*.sif | head -n 1)
    echo "test-cuda-images: $image, $(du -h "$file" | cut -f 1)"
    # shellcheck disable=SC2046  # one word a module
    enter "$file" python3 -W ignore - $(modules "$image") <<'PYTHON'
"""Import the modules, and look for the shared libraries of all packages."""
import importlib, pathlib, re, subprocess, sys

DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1"}
# Parts that load only where the host or another package has their libraries: plugins of NIXL, UCX and NVSHMEM, NIXL's package
# for CUDA 12 beside that for 13, video decoding, and one of numba's threading layers.
OPTIONAL = re.compile(r"/\.?nixl_cu1[23]\.|/nixl_ep_cu12/|/nvshmem_(bootstrap|transport)_|/torchcodec/|/tbbpool\.")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        assert any(each in str(error) for each in DRIVER), f"{name}: {error}"
        print(f"  {name} needs a driver: {error}")
folders = {pathlib.Path(each) for each in sys.path if each.endswith("-packages")}
files = [str(path) for folder in folders for path in folder.rglob("*.so*") if path.is_file()]
provided = {pathlib.Path(each).name for each in files}  # packages load their libraries by path
missing = {}  # library: the files that need it
for at in range(0, len(files), 100):
    owner = files[at]
    said = subprocess.run(["ldd", *files[at : at + 100]], capture_output=True, text=True).stdout
    for line in said.splitlines():
        if line.startswith("/"):
            owner = line.rstrip(":")
        elif (found := re.match(r"\s+(\S+) => not found", line)) and found[1] not in provided:
            missing.setdefault(found[1], []).append(owner)
needed = {name: [owner for owner in owners if not OPTIONAL.search(owner)] for name, owners in missing.items()}
wrong = {name: owners for name, owners in needed.items() if owners and name not in DRIVER}
assert not wrong, f"libraries that are not in the image, and the files that need them: {wrong}"
print(f"  {len(sys.argv) - 1} modules import, and {len(files)} shared libraries find what they need")
print(f"  of the driver: {', '.join(sorted(DRIVER & missing.keys())) or 'none'}")
print(f"  of optional parts: {len(missing.keys() - DRIVER)} libraries")
PYTHON
done
echo "test-cuda-images: passed at $(git rev-parse HEAD)"
