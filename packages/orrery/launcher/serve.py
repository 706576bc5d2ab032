"""Serve weights with vLLM, lend an engine to a run at another site, and export checkpoints.

- `orrery.orchestrator.guests.lend` connects a lent engine to the run.
- With Slurm, an export runs as a job, because login nodes lack torch and memory.
"""

import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from orrery.launcher import containers
from orrery.launcher.process import Process, environment, require
from orrery.launcher.runs import Run, check_address, find, resume_command
from orrery.launcher.site import Site, load_site
from orrery.launcher.slurm.queue import clean_environment, where
from orrery.launcher.stage import Interrupts, catch_signals, end_strays
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import Workspace, pretty_json
from orrery.manifest.json_file import read_object
from orrery.manifest.plan import ProcessPlan, check_supported
from orrery.runtime import network
from orrery.runtime.health import read_health
from orrery.runtime.network import TOKEN_FILE, take_token
from orrery.runtime.run_directory import (
    MANIFEST,
    SITE_FILE,
    WEIGHTS,
    begin,
    endpoints_dir,
    evaluated_path,
    logs_dir,
    memory_prefix,
    remove_memory,
    weights_path,
    whole_checkpoints,
)

STAGE = "serve"
MODULE = "orrery.inference"
CONFIG = "config.json"
POLL_S = 0.1
STOP_S = 10.0  # wait between SIGTERM and SIGKILL
MAX_EXAMPLE = 2000  # maximum characters of the printed example
CUDA = "CUDA_VISIBLE_DEVICES"


def serve(word: str, port: int, workspace: Workspace) -> int:
    folder = check_folder(folder_of(word, workspace))
    check_port(port)
    shown, token = _token()
    run_dir = Path(tempfile.mkdtemp(prefix="orrery-serve-"))
    has_failed = True
    try:
        with catch_signals() as interrupts:
            process = _start(run_dir, folder, port, token, workspace)
            try:
                url = _await_url(process, run_dir, folder, interrupts)
                if url is not None:
                    print(_how_to_ask(url, folder, shown), flush=True)
                    _await_end(process, run_dir, folder, interrupts)
            finally:
                _end([process], interrupts)
        has_failed = False
        print("stopped", file=sys.stderr)
        return 0 if url is not None else 128 + interrupts.received[0]
    finally:
        if not has_failed:
            shutil.rmtree(run_dir, ignore_errors=True)


def folder_of(word: str, workspace: Workspace) -> Path:
    path = Path(word)
    if path.is_dir() and not (path / MANIFEST).exists():
        return path.resolve()
    if "/" in word and not path.is_dir():
        raise OrreryError(f"{word}: no such folder. Name a run, or a Hugging Face folder")
    run = find(word, workspace)
    folder = exported(run)
    if folder is not None:
        return folder
    remedy = f"type `{resume_command(run, 'rl', workspace)}` to train it"
    if whole_checkpoints(run.path):
        remedy = f"type `orrery export {word}` to write the weights of its newest checkpoint"
    raise OrreryError(f"{run.path.name}: RL has not written weights yet; {remedy}")


def exported(run: Run) -> Path | None:
    steps = [
        path
        for path in (run.path / WEIGHTS).glob("step_*")
        if path.name.removeprefix("step_").isdecimal()
    ]
    steps.sort(key=lambda path: int(path.name.removeprefix("step_")), reverse=True)
    found = [weights_path(run.path, "rl"), *steps]
    return next((path for path in found if (path / CONFIG).is_file()), None)


def summary_line(word: str, run: Run) -> str:
    folder = exported(run)
    if folder is None:
        return f"weights: `orrery export {word}` writes the weights of its newest checkpoint"
    return f"weights: {folder}; type `orrery serve {word}` to serve them"


def check_folder(folder: Path) -> Path:
    if not (folder / CONFIG).is_file():
        raise OrreryError(
            f"{folder}: has no {CONFIG}, so it is no Hugging Face folder. Name a folder that a run "
            "or `orrery export RUN` wrote"
        )
    remedy = "copy the folder again"
    if not read_object(folder / CONFIG, remedy).get("architectures"):
        raise OrreryError(f"{folder / CONFIG}: names no architectures of a model; {remedy}")
    if not any(folder.glob("*.safetensors")):
        raise OrreryError(f"{folder}: has no safetensors file, hence no weights; {remedy}")
    return folder


def check_port(port: int) -> None:
    host = network.address()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            [free] = network.free_ports(1, host)
            why = error.strerror or str(error)
            raise OrreryError(
                f"--port {port}: it cannot be opened on {host} ({why}). Type `--port {free}`"
            ) from None


def _token() -> tuple[str, str]:
    file = os.environ.get(TOKEN_FILE)
    if not file:
        token = secrets.token_hex(16)
        return token, token
    if token := take_token():
        return ("<token>" if file == "-" else f"$(cat {file})"), token
    raise OrreryError(
        f"{TOKEN_FILE}: {file} is empty. Write a token into it, such as {secrets.token_hex(16)}"
    )


def _start(run_dir: Path, folder: Path, port: int, token: str, workspace: Workspace) -> Process:
    logs_dir(run_dir).mkdir()
    endpoints_dir(run_dir, STAGE).mkdir(parents=True)
    weights_path(run_dir, STAGE).parent.mkdir()
    weights_path(run_dir, STAGE).symlink_to(folder)
    env = _environment(workspace, secrets.token_hex(8))
    plan = ProcessPlan("inference", 0, MODULE, 0, "with_stage")
    process = Process(plan, run_dir, STAGE, 1, port, None, env, token)
    print(f"starting vLLM for {folder}; its log is {process.log}", file=sys.stderr, flush=True)
    return process


def _await_url(process: Process, run_dir: Path, folder: Path, interrupts: Interrupts) -> str | None:
    endpoint = endpoints_dir(run_dir, STAGE) / "inference.0.json"
    while not endpoint.exists():
        if interrupts.received:
            return None
        _check(process, run_dir, folder)
        time.sleep(POLL_S)
    return str(json.loads(endpoint.read_text())["url"])


def _await_end(process: Process, run_dir: Path, folder: Path, interrupts: Interrupts) -> None:
    while not interrupts.received:
        _check(process, run_dir, folder)
        time.sleep(POLL_S)


def _check(process: Process, run_dir: Path, folder: Path) -> None:
    if process.poll() is None:
        return
    health = read_health(run_dir, STAGE).get(process.name)
    error = (health.error if health else None) or f"the server ended: {process.last_output()}"
    error = error.removesuffix(f". Read logs/{process.name}.log").removeprefix("inference 0: ")
    raise RunFailed(f"{folder}: {error}. Its log is {process.log}")


def _end(processes: list[Process], interrupts: Interrupts) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)
    limit_s = time.monotonic() + STOP_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > limit_s or len(interrupts.received) > 1:
            break
        time.sleep(POLL_S)
    for process in processes:
        process.kill()
        process.wait(STOP_S)


def _environment(workspace: Workspace, start: str) -> dict[str, str]:
    cores = frozenset(os.sched_getaffinity(0))
    env = environment(os.environ, load_site(workspace), start, cores, None)
    env.pop(CUDA)
    return env | ({CUDA: os.environ[CUDA]} if CUDA in os.environ else {})


def _how_to_ask(url: str, folder: Path, token: str) -> str:
    messages = _example(folder)
    path = "completions"
    question: dict[str, object] = {"prompt": messages[-1]["content"]}
    if _has_chat_template(folder):
        path, question = "chat/completions", {"messages": messages}
    body = {"model": folder.name, **question, "max_tokens": 32}
    return "\n".join(
        [
            f"serving {folder} at {url}/v1 (Ctrl-C stops)",
            f"token: {token}",
            f"curl {url}/v1/{path} -H 'Content-Type: application/json' \\",
            f'  -H "Authorization: Bearer {token}" \\',
            f"  -d {shlex.quote(json.dumps(body))}",
        ]
    )


def _example(folder: Path) -> list[dict[str, str]]:
    messages = []
    with (
        suppress(OSError, ValueError, LookupError, TypeError),
        open(evaluated_path(folder.parents[1])) as rows,
    ):
        for message in json.loads(rows.readline())["messages"]:
            if message["role"] not in ("system", "user"):
                break
            messages.append({"role": message["role"], "content": message["content"]})
    is_usable = messages and len(json.dumps(messages)) <= MAX_EXAMPLE
    return messages if is_usable else [{"role": "user", "content": "hello"}]


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_object(config, "copy it again").get("chat_template"))


# Lending

LENT_STAGE = "rl"
ENGINE = ProcessPlan("inference", 0, "orrery.inference", 0, "with_stage")
AGENT = ProcessPlan("orchestrator", 0, "orrery.orchestrator.guests.lend", 0, "itself")


def lend(
    word: str, address: str, listen: str, name: str, certificates: Path, workspace: Workspace
) -> int:
    """Lend an engine until the run ends or a signal arrives. Return the exit code."""
    run = find(word, workspace)
    if run.manifest.orchestrator.guests is None:
        raise OrreryError(
            f"orchestrator.guests: null in {run.manifest.name}, so this run takes no lent engines; "
            "choose a run with the axis jsonnet/elastic/guests.libsonnet"
        )
    check_supported(run.manifest)
    check_address("ADDRESS:PORT", address)
    if listen:
        check_address("--listen", listen)
    place = {"listen": listen, "join": address, "name": name, "shard": None}
    place |= {"certificates": str(certificates.resolve())}
    weights = _first_weights(run)
    run_dir = Path(tempfile.mkdtemp(prefix="orrery-lend-"))
    has_failed, processes = True, list[Process]()
    start = secrets.token_hex(8)
    try:
        with catch_signals() as interrupts:
            try:
                _prepare_lending(run_dir, run, weights, place)
                _start_lending(processes, run_dir, start, workspace)
                _await_run_end(processes, run_dir, interrupts)
            finally:
                _end(processes, interrupts)
                end_strays(processes, start)
        has_failed = False
        return 128 + interrupts.received[0] if interrupts.received else 0
    finally:
        remove_memory(memory_prefix(run_dir))
        if not has_failed:
            shutil.rmtree(run_dir, ignore_errors=True)


def _first_weights(run: Run) -> Path:
    for stage in (run.manifest.stage_before_rl, "init"):
        if ((path := weights_path(run.path, stage)) / CONFIG).is_file():
            return path
    raise OrreryError(
        f"{run.path.name}: no weights for an engine yet; type `orrery run {run.manifest.name} init`"
    )


def _prepare_lending(run_dir: Path, run: Run, weights: Path, place: Mapping[str, object]) -> None:
    begin(run_dir)
    (run_dir / MANIFEST).write_text(pretty_json(run.manifest))
    (run_dir / SITE_FILE).write_text(json.dumps(place))
    logs_dir(run_dir).mkdir()
    endpoints_dir(run_dir, LENT_STAGE).mkdir(parents=True)
    link = weights_path(run_dir, run.manifest.stage_before_rl)
    link.parent.mkdir()
    link.symlink_to(weights.resolve())


def _start_lending(
    processes: list[Process], run_dir: Path, start: str, workspace: Workspace
) -> None:
    token, env = secrets.token_hex(16), _environment(workspace, start)
    for plan, port in zip((ENGINE, AGENT), network.free_ports(2), strict=True):
        processes.append(Process(plan, run_dir, LENT_STAGE, 1, port, None, env, token))
    logs = ", ".join(str(process.log) for process in processes)
    print(f"starting an engine to lend; logs: {logs}", file=sys.stderr, flush=True)


def _await_run_end(processes: list[Process], run_dir: Path, interrupts: Interrupts) -> None:
    engine, agent = processes
    while not interrupts.received:
        if agent.poll() == 0:
            print("the run is over", file=sys.stderr)
            return
        for process in (agent, engine):
            if process.poll() is not None:
                health = read_health(run_dir, LENT_STAGE).get(process.name)
                error = (
                    health.error if health else None
                ) or f"{process.name} ended: {process.last_output()}"
                raise RunFailed(f"{error}. Its log is {process.log}")
        time.sleep(POLL_S)


# Export

# $1 is the host folder mounted at the container's /tmp. The trap removes it.
IN_A_FOLDER = 'mkdir -p "$1" && trap \'rm -rf "$1"\' EXIT && "${@:2}"'
CPUS, MEMORY_MB = 2, 16_000


def write_export(
    found: Run, stage: str, step: int | None, to: Path | None, workspace: Workspace, site: Site
) -> int:
    argv = ["-m", "orrery.trainer.export", str(found.path), "--stage", stage]
    argv += [] if step is None else ["--step", str(step)]
    argv += [] if to is None else ["--to", str(to.resolve())]
    if site.slurm is None:
        require("export", "torch")
        return subprocess.run([sys.executable, *argv]).returncode
    variables = {
        **containers.without_apptainer_options(clean_environment(os.environ)),
        **site.environment,
    }
    if site.containers is None:
        words = [sys.executable, *argv]
    else:
        words = _in_image(found, argv, to, workspace, site)
        variables |= containers.container_variables(site.environment)
    return _check_arrived(subprocess.run([*srun(site), *words], env=variables).returncode, to)


def _in_image(
    found: Run, argv: Sequence[str], to: Path | None, workspace: Workspace, site: Site
) -> list[str]:
    place = site.containers
    assert place is not None
    if to is not None:
        parent = to.resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        place = place.model_copy(update={"mounts": (*place.mounts, str(parent))})
    image = containers.image_of(place, workspace, found.manifest.hardware, "trainer")
    code = containers.snapshot(workspace, found.path)
    scratch = containers.scratch_of(place, f"export-{os.getpid()}-{found.path.name}")
    command = ["python3", *argv]
    folders = scratch, scratch
    inside = containers.apptainer(place, image, found.path, code, folders, False, command)
    inside = containers.with_modules(site.containers, inside)
    return ["bash", "-c", IN_A_FOLDER, "export", str(scratch), *inside]


def _check_arrived(code: int, to: Path | None) -> int:
    # List the parent, because NFS may cache the absence of `to`.
    if code == 0 and to is not None and to.name not in _names(to.resolve().parent):
        raise OrreryError(
            f"--to {to}: the job wrote it on its node, but this node does not see it. "
            "Choose a folder that all nodes share"
        )
    return code


def _names(folder: Path) -> Sequence[str]:
    return os.listdir(folder) if folder.is_dir() else ()


def srun(site: Site) -> Sequence[str]:
    slurm = site.slurm
    assert slurm is not None
    return [
        *("srun", "--job-name=orrery-export"),
        *where(slurm, slurm.cpu_partition),
        *(f"--time={slurm.time_limit_min}", "--nodes=1", "--ntasks=1"),
        f"--cpus-per-task={min(CPUS, slurm.cpus_per_node)}",
        f"--mem={min(MEMORY_MB, slurm.memory_per_node_mb)}M",
        *("--export=ALL", "--input=none", *slurm.extra),
    ]
