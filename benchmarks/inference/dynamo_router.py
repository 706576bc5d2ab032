"""Send requests through NVIDIA Dynamo's router to two engines on CPU, and update their weights.

- Dynamo's frontend routes by the engines' cache events. The engines run `dynamo.vllm` with the
  arguments that `contrib/kubernetes` renders, on an untrained mixture of experts.
- Dynamo 1.6 is made for vLLM 0.31. With vLLM 0.32 on CPU its worker starts once two modules that
  text models do not use are replaced.
- The value is the largest difference between log-probs of answers and those of the weights that the
  engines should hold, before and after an update. Routes are also counted.
- An engine must find the prompt in its cache under the same salt, and not under another salt.
- Dynamo listens on every interface, so everything runs in a network namespace, as root.

    uv pip install --no-deps --target SITE ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 \\
        redis zstandard blake3
    unshare --net sh -c \\
        'ip link set lo up && python benchmarks/inference/dynamo_router.py --site SITE'
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch

from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.models import build
from orrery.models.weights import initialize, save
from orrery.tasks.chat import write_tokenizer
from record import ROOT, parser_of, record

BASE, ENGINES, GOAL = "reverse_text_moe", 2, 1e-4
HTTP, SYSTEM, EVENTS = 18700, 18701, 18750  # ports. The last two are the first engine's
START_S = 600.0
PROMPT, ANSWER_TOKENS = [*range(9, 79), *range(9, 51)], 8  # three whole KV blocks, and a half
TRIES = 20  # maximum number of requests of one kind
# Modules for image and embedding models, which fail to import on CPU with vLLM 0.32.
UNUSED = (
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "dynamo.vllm.embedding_worker_processes",
)


class Unused(types.ModuleType):
    """A module whose functions return None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


def work(folder: Path, arguments: list[str]) -> None:
    """Run `dynamo.vllm`."""
    from orrery.inference import plugin
    from orrery.inference.assemble import engine_environment
    from orrery.inference.patches import registry

    manifest = load(folder / "manifest.json")
    engine_environment(manifest, "127.0.0.1")
    registry.import_vllm(enforce_eager=True)
    plugin.register()
    registry.correct_server(manifest)
    reload_with_kernels()
    for name in UNUSED:
        sys.modules[name] = Unused(name)
    from dynamo.vllm.main import main as run

    sys.argv = ["dynamo.vllm", *arguments]
    run()


def reload_with_kernels() -> None:
    """Make vLLM's own reload on CPU use the new weights in packed experts and tied heads."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from orrery.inference.patches.vllm import forget_moe_kernels, repack_tied_heads

    reload = GPUModelRunner.reload_weights

    def reload_and_pack(self: Any, *args: Any, **options: Any) -> None:
        forget_moe_kernels(self.model)
        reload(self, *args, **options)
        repack_tied_heads(self.model)

    GPUModelRunner.reload_weights = reload_and_pack


def make_run(folder: Path) -> Manifest:
    """Write a manifest, and the weights of two versions: `init` and `next`."""
    content = json.loads((ROOT / "manifests" / f"{BASE}.json").read_text())
    content["transport"]["routed_experts"] = True
    content["inference"] |= {"num_replicas": ENGINES, "max_num_sequences": 16}
    content["inference"]["router"] = {
        "kind": "vllm_router", "policy": "cache_aware",
        "balance_abs_threshold": 2, "balance_rel_threshold": 1.1,
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(content))
    manifest = load(folder / "manifest.json")
    for seed, name in enumerate(("init", "next")):
        save(module_of(manifest, seed), manifest.model, folder / "weights" / name)
        write_tokenizer(manifest.model, folder / "weights" / name)
    return manifest


def module_of(manifest: Manifest, seed: int) -> Any:
    init = manifest.model.init.model_copy(update={"seed": seed, "std": 0.3})
    module = build(manifest.model, torch.float32, "cpu")
    initialize(module, manifest.model.model_copy(update={"init": init}))
    return module


def worker_arguments(manifest: Manifest, folder: Path, index: int) -> list[str]:
    """Return the arguments that `contrib/kubernetes` renders, with ports of this machine."""
    sys.path.append(str(ROOT / "contrib/kubernetes"))
    from dynamo import EVENTS as events
    from dynamo import without_server_flags
    from orrery.inference.assemble import server_arguments

    words = server_arguments(manifest, folder / "weights/init", index, "127.0.0.1", 0)
    # Only with a wildcard in its address does vLLM bind the socket that Dynamo connects to.
    events = events | {"endpoint": f"tcp://*:{EVENTS + index}"}
    return [*without_server_flags(words), "--kv-events-config", json.dumps(events)]


@contextmanager
def dynamo(site: Path, manifest: Manifest, folder: Path) -> Iterator[None]:
    """Run the frontend and the engines."""
    paths = filter(None, [str(site), os.environ.get("PYTHONPATH")])
    variables = {
        "PYTHONPATH": os.pathsep.join(paths),
        "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": f"{folder}/found",
        "DYN_LOG": "warn", "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_SYSTEM_HOST": "127.0.0.1",
        "DYN_ENABLE_RL": "1", "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
        "ORRERY_INTERFACE": "lo",
    }  # fmt: skip
    front = ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(HTTP)]
    commands = [[*front, "--router-mode", "kv"]]
    for index in range(ENGINES):
        words = worker_arguments(manifest, folder, index)
        commands.append([__file__, "--work", str(folder), "--", *words])
    processes = []
    try:
        for number, command in enumerate(commands):
            env = os.environ | variables
            if number:
                env["DYN_SYSTEM_PORT"] = str(SYSTEM + number - 1)
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen([sys.executable, *command], env=env, stdout=log, stderr=log)
                )
        end_s = time.monotonic() + START_S
        while not all(is_ready(SYSTEM + index) for index in range(ENGINES)) or "error" in ask("0"):
            if any(process.poll() is not None for process in processes) or time.monotonic() > end_s:
                logs = [(folder / f"{i}.log").read_text()[-2000:] for i in range(ENGINES + 1)]
                raise SystemExit("\n".join(logs))
            time.sleep(1.0)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def is_ready(port: int) -> bool:
    return call(port, "/health").get("status") == "ready"


def call(port: int, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON of an answer, or {"error": …}."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except OSError as error:
        return {"error": str(error)}


def ask(salt: str, name: str = "x") -> dict[str, Any]:
    sampling = {"max_tokens": ANSWER_TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}
    body = {"model": "policy", "token_ids": PROMPT, "cache_salt": salt, "request_id": name}
    return call(HTTP, "/inference/v1/generate", body | {"sampling_params": sampling})


def counters() -> list[tuple[float, float]]:
    """Return for each engine the prompt tokens of all requests, and those found in its cache."""
    names = "queries", "hits"
    patterns = [re.compile(rf"^vllm:prefix_cache_{one}_total\{{.*\}} (\S+)", re.M) for one in names]
    found = []
    for index in range(ENGINES):
        with urllib.request.urlopen(f"http://127.0.0.1:{SYSTEM + index}/metrics") as answer:
            text = answer.read().decode()
        asked, hits = (sum(map(float, pattern.findall(text))) for pattern in patterns)
        found.append((asked, hits))
    return found


def ask_counted(salt: str) -> tuple[dict[str, Any], int, float]:
    """Return an answer, the engine that gave it, and the cached tokens of its prompt."""
    before, answer, after = counters(), ask(salt, f"salt-{salt}"), counters()
    changes = [(new[0] - old[0], new[1] - old[1]) for old, new in zip(before, after, strict=True)]
    [engine] = [index for index, (asked, _) in enumerate(changes) if asked == len(PROMPT)]
    return answer, engine, changes[engine][1]


def most_overlap(folder: Path) -> int:
    """Return the largest number of a prompt's blocks that the router knew in an engine's cache."""
    text = re.sub(r"\x1b\[\d*m", "", (folder / "0.log").read_text())  # without colours
    return max(map(int, re.findall(r"overlap_blocks=(\d+)", text)), default=0)


def measure_salts(folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return answers and cached tokens. Raise SystemExit if salts share blocks or find none."""
    answers: list[dict[str, Any]] = []
    at_first: dict[int, float] = {}
    for _ in range(TRIES):  # the engines' events reach the router later than their answers
        answer, engine, cached = ask_counted("1")
        answers.append(answer)
        if engine in at_first and most_overlap(folder):
            break
        at_first.setdefault(engine, cached)
    else:
        raise SystemExit(f"error: the router saw no cached block in {TRIES} equal requests")
    other = []
    for number in range(TRIES):
        _, index, found = ask_counted(f"other-{number}")
        other.append(found)
        if index == engine:
            break
    else:
        raise SystemExit(f"error: {TRIES} requests with other salts missed engine {engine}")
    details = {
        "prompt_tokens": len(PROMPT),
        "overlap_blocks_of_router": most_overlap(folder),
        "cached_tokens_first": max(at_first.values()),
        "cached_tokens_same_salt": cached,
        "cached_tokens_other_salt": max(other),
    }
    if not (cached > 0 == max(other) == details["cached_tokens_first"]):
        raise SystemExit(f"error: only the same salt should find cached blocks: {details}")
    return answers, details


def difference(module: Any, answer: dict[str, Any]) -> float:
    """Return the largest difference of the answer's log-probs from the module's."""
    choice = answer["choices"][0]
    tokens = torch.tensor([*PROMPT, *choice["token_ids"]])
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    hidden = module(tokens, torch.arange(len(tokens)), ends)
    rows = torch.log_softmax((hidden @ module.lm_head_weight.T).float(), -1)[len(PROMPT) - 1 : -1]
    ours = rows.gather(1, tokens[len(PROMPT) :, None]).squeeze(1).detach().numpy()
    theirs = np.array([each["logprob"] for each in choice["logprobs"]["content"]])
    return float(np.abs(ours - theirs).max())


def every_engine(path: str, **body: Any) -> list[dict[str, Any]]:
    answers = [call(SYSTEM + index, f"/engine/{path}", body) for index in range(ENGINES)]
    if any(answer.get("status") != "ok" for answer in answers):
        raise SystemExit(f"error: {path}: {answers}")
    return answers


def measure(manifest: Manifest, folder: Path) -> dict[str, Any]:
    answers, salts = measure_salts(folder)
    every_engine("pause_generation")
    path = str(folder / "weights/next")
    every_engine("update_weights_from_disk", model_path=path, weight_version="1")
    every_engine("resume_generation")
    versions = [each["version"] for each in every_engine("get_weight_version")]
    updated = [ask(f"updated-{number}", f"updated-{number}") for number in range(2 * ENGINES)]
    old, new = module_of(manifest, 0), module_of(manifest, 1)
    return {
        "difference_before_update": max(difference(old, each) for each in answers),
        "difference_after_update": max(difference(new, each) for each in updated),
        "difference_of_old_weights_after_update": difference(old, updated[0]),
        "versions": versions,
        "shape_of_routes": answers[0]["choices"][0]["routed_experts"]["shape"],
        "says_versions_of_tokens": bool(updated[0]["choices"][0].get("weight_versions")),
    } | salts


def versions(site: Path) -> dict[str, str]:
    found = metadata.distributions(path=[str(site)])
    return {each.name: each.version for each in found if each.name.startswith("ai-dynamo")}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--site", type=Path, help="folder with Dynamo's packages")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args, words = parser.parse_known_args()
    torch.set_num_threads(1)
    if args.work is not None:
        return work(args.work, words[1:])
    if args.site is None:
        parser.error("--site: name the folder with Dynamo's packages")
    with tempfile.TemporaryDirectory() as name:
        manifest = make_run(Path(name))
        with dynamo(args.site, manifest, Path(name)):
            found = measure(manifest, Path(name))
    record(
        args.out / "dynamo_router.json",
        figure="inference/dynamo_router",
        value=max(found["difference_before_update"], found["difference_after_update"]),
        unit="nat",
        goal=GOAL,
        better="lower",
        details=found | versions(args.site),
    )


if __name__ == "__main__":
    main()
