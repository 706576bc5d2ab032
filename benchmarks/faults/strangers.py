"""Attack every listener of a live run without its token. Count answers and changes of state.

- The run has two engines behind a router and two trainer ranks. Weights go from rank to rank. Once
  the run trains, its sockets are listed. A socket that is not in `LISTENERS` is a defect.
- Our listeners get every route and method with no or wrong credentials, garbage, nested msgpack,
  messages of 100 MB, ZeroMQ without keys and idle connections. They must answer 401 or a
  public page, or close.
- Sockets of libraries without authentication (torch, gloo, vllm-router's metrics) are only counted.
- The run must keep its engines and roles, and train each later batch once, on its own tokens.

    python benchmarks/faults/strangers.py                # as root, about 3 minutes on two cores
    python benchmarks/faults/strangers.py --out /tmp     # a trial that leaves the record alone
"""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import zmq

sys.path.insert(0, str(Path(__file__).parents[1]))
from listeners import Socket, listening, undeclared

from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import read
from orrery.runtime.network import LOOPBACK, Purpose, authorization, credential
from orrery.wire.weight_wire import coordinator, weight_dir
from record import parser_of, record
from workspace import workspace_with

ROOT = Path(__file__).parents[2]
BASE, NAME = "reverse_text_smoke", "strangers"
NUM_STEPS, AFTER_STEP, MORE_STEPS = 1000, 2, 5  # RL steps in all, before, after the attack
TOKEN = "7ab1e5" * 5
# `orrery` with a token that this program knows, since no process reveals a random one.
KNOWN_TOKEN = f"""
import secrets
from orrery.launcher.cli import main
drawn = secrets.token_hex
secrets.token_hex = lambda num_bytes: {TOKEN!r} if num_bytes == 16 else drawn(num_bytes)
main()
"""
ANSWER_S = 3.0
HUGE_BYTES = 100 << 20
NUM_HALF_OPEN = 100
SAME_WEIGHTS = 1e-4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)  # ZeroMQ's, without keys
PUBLIC = ("/health", "/metrics")  # routes that need no token
PATHS = (
    *(
        "/",
        "/health",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/ping",
        "/version",
        "/server_info",
        "/v1/models",
        "/list_workers",
        "/workers",
    ),
    *(
        "/add_worker?url=http://127.0.0.1:9",
        "/remove_worker?url=http://127.0.0.1:9",
        "/authorized",
        "/get_worker_metrics",
        "/flush_cache",
    ),
    *(
        "/inference/v1/generate",
        "/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/collective_rpc",
        "/pause",
        "/resume",
    ),
    *(
        "/is_paused",
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/update_weights",
        "/init_weight_transfer_engine",
        "/start_weight_update",
    ),
    *(
        "/finish_weight_update",
        "/load_lora_adapter",
        "/unload_lora_adapter",
        "/abort_requests",
        "/scale_elastic_ep",
        "/start_profile",
    ),
    *(
        "//add_worker",
        "/health/../add_worker",
        "/health%2f..%2fadd_worker",
        "/health?x=/add_worker",
        "/HEALTH",
    ),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS")
WRONG = (
    None,
    "Bearer ",
    "Bearer " + "0" * 64,
    f"Bearer {credential('another', Purpose.ADMINISTER)}",
    "Basic b3JyZXJ5Og==",
)


class AttackedRun:
    """A run in its own workspace, with a known token."""

    def __init__(self, workspace: Path) -> None:
        content = json.loads((ROOT / "manifests" / f"{BASE}.json").read_text())
        content["name"], content["stages"]["rl"]["num_steps"], content["transport"]["weights"] = (
            NAME,
            NUM_STEPS,
            "nccl",
        )
        self.manifest = Manifest.model_validate(content)
        self.workspace, self.folder = workspace, workspace_with(workspace, self.manifest)

    def start(self, stage: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        with open(self.workspace / "said", "w") as said:
            return subprocess.Popen(
                [sys.executable, "-c", KNOWN_TOKEN, "run", NAME, stage],
                cwd=self.workspace,
                env=environment,
                stdout=said,
                stderr=said,
            )

    def failed(self, what: str) -> SystemExit:
        return SystemExit(f"{what}:\n{(self.workspace / 'said').read_text()[-3000:]}")

    def trained(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics" / "trainer.0.jsonl"
        return (
            [row for row in read(path) if row.get("stage") == "rl" and row.get("event") is None]
            if path.exists()
            else []
        )

    def roles(self) -> dict[int, str]:
        """Return pid → role for the running stage."""
        status = json.loads((self.folder / "status.json").read_text())
        return {role["pid"]: role["name"].split(".")[0] for role in status["roles"]}

    def stores(self) -> dict[str, tuple[str, int]]:
        """Return the (host, port) of the TCPStores that this project opens."""
        trainer = json.loads(
            (self.folder / "stages" / "rl" / "endpoints" / "trainer.0.json").read_text()
        )["url"]
        wire = coordinator.find_wire(
            weight_dir(
                self.folder, json.loads((self.folder / "status.json").read_text())["attempt"]
            )
        )
        host, _, port = trainer.removeprefix("tcp://").rpartition(":")
        return {"trainer": (host, int(port)), "weight wire": (wire.host, wire.port)}

    def engines_of_router(self) -> list[str]:
        [path] = (self.folder / "stages" / "rl" / "endpoints").glob("router.*.json")
        url = json.loads(path.read_text())["url"] + "/list_workers"
        asked = urllib.request.Request(url, headers=authorization(TOKEN, Purpose.ADMINISTER))
        return sorted(json.loads(urllib.request.urlopen(asked, timeout=10).read())["urls"])


def ask(
    address: tuple[str, int], method: str, path: str, given: str | None, body: bytes = b"{}"
) -> str:
    """Return the HTTP status of the answer, or "nothing" without an answer."""
    headers = {"Content-Type": "application/json"} | (
        {} if given is None else {"Authorization": given}
    )
    try:
        connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
        connection.request(method, path, body if method in ("POST", "PUT") else None, headers)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException):
        return "nothing"
    finally:
        connection.close()


def say(address: tuple[str, int], content: bytes) -> str:
    """Send raw bytes; return the HTTP status, "an answer" for other bytes, or "nothing"."""
    with suppress(OSError), socket.create_connection(address, timeout=ANSWER_S) as peer:
        with suppress(OSError):
            for start in range(0, len(content), 1 << 20):
                peer.sendall(content[start : start + (1 << 20)])
            peer.shutdown(socket.SHUT_WR)
        answer = peer.recv(4096)
        if answer.startswith(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f") or not answer:
            return "nothing"  # ZeroMQ's greeting tells only its version and that it wants CURVE
        return answer.split()[1].decode() if answer.startswith(b"HTTP/1.") else "an answer"
    return "nothing"


def zeromq(address: tuple[str, int], content: bytes) -> str:
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.sndtimeo = dealer.rcvtimeo = int(ANSWER_S * 1000)
        dealer.connect("tcp://{}:{}".format(*address))
        dealer.send(content)
        return "an answer" if dealer.recv_multipart() else "nothing"
    except zmq.Again:
        return "nothing"
    finally:
        context.destroy(linger=0)


def store_keys(address: tuple[str, int]) -> int | None:
    """Return the number of keys that a TCPStore shows, or None if the address has no TCPStore.

    The client runs in a subprocess, because it may block for long.
    """
    code = (
        "import sys, datetime, torch.distributed as d\n"
        f"store = d.TCPStore({address[0]!r}, {address[1]}, None, False, "
        f"timeout=datetime.timedelta(seconds=3), wait_for_workers=False)\n"
        "print(len(store.list_keys()))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 else None


def attack(one: Socket, held: ExitStack) -> dict[str, Any]:
    """Attack one listener in every way; return the attempts by kind and outcome."""
    address, rng = (one.address, one.port), random.Random(one.port)
    with suppress(OSError):
        for _ in range(NUM_HALF_OPEN):
            held.enter_context(socket.create_connection(address, timeout=ANSWER_S))
    nested = b"\x82\xa4type\xa3ask\xa1x" + b"\x91" * 100_000
    outcomes = {
        kind: Counter[str]()
        for kind in ("routes", "garbage", "nested", "huge", "ZeroMQ without keys")
    }
    is_http = ask(address, "GET", "/", None) != "nothing"
    for path in PATHS if is_http else PATHS[:3]:
        for method in METHODS if is_http else METHODS[:1]:
            for given in WRONG if is_http else WRONG[:1]:
                outcome = ask(address, method, path, given)
                if (
                    one.role == "inference"
                    and path.split("?")[0] in PUBLIC
                    and outcome in ("200", "405")
                ):
                    outcome = "public"
                elif one.program and method == "OPTIONS" and outcome == "200":
                    outcome = "preflight"
                outcomes["routes"][outcome] += 1
    for _ in range(20):
        outcomes["garbage"][say(address, rng.randbytes(rng.choice([1, 40, 5000])))] += 1
    outcomes["nested"][say(address, nested)] += 1
    outcomes["huge"][
        say(
            address,
            b"POST /inference/v1/generate HTTP/1.1\r\nContent-Length: 104857600\r\n\r\n"
            + bytes(HUGE_BYTES),
        )
    ] += 1
    for kind, content in (("huge", bytes(HUGE_BYTES)), ("ZeroMQ without keys", nested)):
        # An HTTP server gets plain bytes: libzmq would read its answer as a ZMTP 1.0 message.
        outcomes[kind][
            say(address, GREETING + content) if is_http else zeromq(address, content)
        ] += 1
    allowed = (*ALLOWED, *(REFUSALS_OF_VLLM_ROUTER if one.program else ()))
    answered = sum(
        count for each in outcomes.values() for how, count in each.items() if how not in allowed
    )
    attempts = sum(each.total() for each in outcomes.values())
    return {
        "listener": _named(one),
        "attempts": attempts,
        "answers_but_401_or_nothing": answered,
        "outcomes": outcomes,
    }


ALLOWED = ("401", "nothing", "public", "400")  # 400: bytes other than HTTP reach no route
# vllm-router refuses wrong methods and bodies and answers CORS preflights before it checks the key.
REFUSALS_OF_VLLM_ROUTER = ("405", "415", "422", "preflight")


def peak_bytes(pid: int) -> int:
    [line] = [
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    ]
    return int(line.split()[1]) * 1024


def measure(run: AttackedRun) -> tuple[int, dict[str, Any]]:
    for stage in ("init", "sft"):
        if run.start(stage).wait():
            raise run.failed(f"{stage} was to end well, and did not")
    launcher = run.start("rl")
    try:
        return besiege(run, launcher)
    finally:
        launcher.terminate()
        launcher.wait()


def besiege(run: AttackedRun, launcher: "subprocess.Popen[bytes]") -> tuple[int, dict[str, Any]]:
    """Attack the running stage; return the number of defects and the details of the record.

    Raise SystemExit with the end of the run's output if the run ends.
    """
    while len(run.trained()) < AFTER_STEP:
        if launcher.poll() is not None:
            raise run.failed("rl ended before it trained")
        time.sleep(0.2)
    roles = run.roles()
    sockets, engines = listening(roles), run.engines_of_router()
    ours = [
        one
        for one in sockets
        if one.port and any(row.is_ours for row in one.rows(LOOPBACK)) and not _is_metrics(one)
    ]
    before = {pid: peak_bytes(pid) for pid in roles}
    rows = []
    with ExitStack() as held:
        for one in ours:
            rows.append(attack(one, held))
            print(json.dumps(rows[-1]), flush=True)
        trained = len(run.trained())
        while launcher.poll() is None and len(run.trained()) < trained + MORE_STEPS:
            time.sleep(0.2)
        if launcher.poll() is not None:
            raise run.failed("the attack ended the run")
    grown = {
        f"{roles[pid]} {pid}": peak_bytes(pid) - before[pid]
        for pid in roles
        if psutil.pid_exists(pid)
    }
    changed = [] if engines == run.engines_of_router() else ["the router's engines"]
    changed += [] if run.roles() == roles else ["roles ended or were started again"]
    steps = [row["step"] for row in run.trained()]
    changed += [] if steps == list(range(1, len(steps) + 1)) else ["a batch was not trained once"]
    differences = [row["logprob_max_abs_diff_same_weights"] or 0.0 for row in run.trained()]
    changed += [] if max(differences) <= SAME_WEIGHTS else ["tokens of another policy were trained"]
    stores = {name: store_keys(address) for name, address in run.stores().items()}
    answered = sum(row["answers_but_401_or_nothing"] for row in rows)
    unlisted = undeclared(sockets, LOOPBACK)
    attempts = sum(row["attempts"] for row in rows) + len(ours) * NUM_HALF_OPEN
    details = {
        "listeners": len(sockets),
        "of_ours": len(ours),
        "attempts": attempts,
        "undeclared": unlisted,
        "answers_but_401_or_nothing": answered,
        "state_changed": changed,
        "most_memory_grown_bytes": max(grown.values()),
        "steps_trained": len(steps),
        "listeners_by_name": Counter(map(_named, sockets)),
        "keys_that_stores_of_torch_show": stores,
        "rows": rows,
    }
    return answered + len(changed) + len(unlisted), details


def _is_metrics(one: Socket) -> bool:
    """Return whether this is vllm-router's metrics port. It answers any GET without a key."""
    return (
        one.role == "router"
        and bool(one.program)
        and ask((one.address, one.port), "GET", "/metrics", None) == "200"
    )


def _named(one: Socket) -> str:
    program = f", {one.program}" if one.program else ""
    return f"{one.role}{program}{'' if one.port else ', Unix socket'}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent, help="the folder of strangers.json"
    )
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as workspace:
        value, details = measure(AttackedRun(Path(workspace)))
    print(json.dumps(details, indent=1))
    record(
        out / "strangers.json",
        figure=(
            "answers but 401 or nothing, changes of state and undeclared sockets, with a "
            "stranger at every listener of a live run"
        ),
        value=value,
        unit="defects",
        goal=0,
        better="lower",
        details=details,
    )


if __name__ == "__main__":
    main()
