"""Runs on the simulated cluster with real Slurm, Apptainer images and vLLM, and their failures.

Where it can, each test finishes its run after the failure.
"""

import json
import re
import shlex
import time
from contextlib import suppress

import pytest
from simulated import NODES, SLURM, Cluster, Run

pytestmark = pytest.mark.timeout(420)
NUM_STEPS = 60  # RL steps, enough for a reward of 0.8


@pytest.fixture
def fresh(cluster: Cluster):
    """A run before its start."""

    def made(name: str) -> Run:
        run = Run(cluster, name)
        run.remove()
        return run

    return made


@pytest.fixture
def shorter(cluster: Cluster):
    """The spec of reverse_text with `NUM_STEPS`, rendered on the login node."""
    spec = cluster.checkout / "jsonnet" / "runs" / "reverse_text.jsonnet"
    whole = spec.read_text()
    spec.write_text(whole.replace("rl+: { num_steps: 100 }", f"rl+: {{ num_steps: {NUM_STEPS} }}"))
    cluster.run("orrery", "render", "reverse_text")
    yield
    spec.write_text(whole)
    cluster.run("orrery", "render", "reverse_text")


def test_the_demo_runs_to_its_end_over_a_time_limit(cluster: Cluster, fresh, shorter):
    """The RL job reaches its time limit, writes a checkpoint, and is requeued."""
    run = fresh("reverse_text")
    # Files of jobs that other tests killed.
    there = {node: cluster.on(node, "ls", "/dev/shm", "/tmp").stdout.split() for node in NODES}
    terminal = run.start()
    cluster.wait_until(
        "RL has trained a few steps",
        lambda: run.is_in("rl", terminal) and len(run.steps()) >= 12,
        200,
        lambda: terminal.output[-2000:],
    )
    job, before = run.job(), len(run.steps())
    status = run.user("orrery", "status", "reverse_text")
    assert (
        re.search(rf"job {job} \(rl\): running for .* on node\d", status)
        and "orchestrator.0" in status
        and "node" in status
    )
    logs = cluster.start("orrery", "logs", "reverse_text", "trainer", "-f")
    cluster.wait_until(
        "the log is followed",
        lambda: logs.output.count("step") > 2 and f"step {before + 1}:" in logs.output,
        30,
    )
    logs.interrupt()
    cluster.end_time(job, 45)  # Slurm sends the warning at once: less than slurm.warning_s is left
    cluster.wait_until(
        "the job is back in the queue",
        lambda: cluster.state(job) in ("PENDING", "CONFIGURING"),
        90,
        lambda: terminal.output[-2000:],
    )
    # A queued job keeps the limit that it was given.
    cluster.on("head", "scontrol", "update", f"JobId={job}", "TimeLimit=30")
    said = (run.path / "logs" / "launcher.0.log").read_text()
    wound_down = re.search(
        r"rl: wound down; type `snakemake --profile slurm reverse_text` to go on from step (\d+)",
        said,
    )
    assert wound_down and int(wound_down[1]) >= before and int(wound_down[1]) in run.checkpoints()
    assert "goes on by itself" in run.user("orrery", "status", "reverse_text")
    assert terminal.wait(300) == 0, terminal.output[-3000:]
    assert run.steps() == list(range(1, NUM_STEPS + 1))  # none twice, none left out
    said = (run.path / "logs" / "launcher.0.log").read_text()
    assert (
        f"started again by Slurm (job {job}): wound down; rl goes on from step {wound_down[1]}"
        in said
    )
    result = json.loads((run.path / "stages" / "evaluate" / "result.json").read_text())
    assert result["after"]["reward_mean"] >= 0.8 > result["before"]["reward_mean"]
    receipt = run.receipt()["stages"]["rl"]
    assert [attempt["state"] for attempt in receipt["attempts"]] == ["stopped", "done"]
    assert all(
        attempt["slurm_job_id"] == job and attempt["nodes"][0].startswith("node")
        for attempt in receipt["attempts"]
    )
    assert set(receipt["attempts"][-1]["images"]) == {"inference", "orchestrator", "trainer"}
    exported = cluster.run("orrery", "export", "reverse_text", timeout_s=120).stdout.strip()
    assert exported.endswith(f"{run.path.name}/weights/step_{NUM_STEPS}")
    rl, newest = (
        (run.path / "weights" / name / "model.safetensors").read_bytes()
        for name in ("rl", f"step_{NUM_STEPS}")
    )
    assert newest == rl
    compiled: list[str] = []
    for node in NODES:
        left = [
            name
            for name in cluster.on(node, "ls", "/dev/shm", "/tmp").stdout.split()
            if name not in there[node]
        ]
        assert not [name for name in left if "orrery" in name and "-kernels-" not in name], left
        look = "find /tmp/orrery-kernels-* -maxdepth 0 -printf '%m %u\n'"
        kept = cluster.on(node, "sh", "-c", look, check=False).stdout.splitlines()
        assert set(kept) <= {f"700 {cluster.login}"}, kept
        look = "find /tmp/orrery-kernels-*/vllm -type f"
        compiled += cluster.on(node, "sh", "-c", look, check=False).stdout.split()
    assert compiled, "no engine left its compiled kernels on its node"
    mode = run.path.stat().st_mode
    assert not mode & 0o002, oct(mode)


def test_four_nodes_lose_a_role_and_then_a_node_and_end_well(cluster: Cluster, fresh):
    """glm5_shape_smoke has prefill, decode and two trainer nodes.

    A killed engine is restarted on its node. A killed rank ends the stage with its name. After
    the death of a node Slurm requeues the job.
    """
    run = fresh("glm5_shape_smoke")
    terminal = run.start()
    cluster.wait_until(
        "a checkpoint is there",
        lambda: run.is_in("rl", terminal) and run.checkpoints(),
        180,
        lambda: terminal.output[-2000:],
    )
    nodes = {role["name"]: role["node"] for role in run.status()["roles"]}
    assert nodes == {
        **{"inference.0": "node1", "orchestrator.0": "node1", "inference.1": "node2"},
        **{"trainer.0": "node3", "trainer.1": "node4"},
    }  # fmt: skip
    found = {node: _sockets(cluster, run, node) for node in sorted(set(nodes.values()))}
    assert all(count > 1 for count, _ in found.values())
    assert [sentence for _, undeclared in found.values() for sentence in undeclared] == []
    cluster.on("node2", "kill", "-9", str(run.health("inference.1")["pid"]))
    cluster.wait_until(
        "the engine serves again",
        lambda: (
            run.is_in("rl", terminal)
            and [row for row in run.rows("orchestrator.0") if row.get("event") == "engine_healthy"]
        ),
        150,
        lambda: terminal.output[-2000:],
    )
    assert [
        (role["node"], role["restarts"])
        for role in run.status()["roles"]
        if role["name"] == "inference.1"
    ] == [("node2", 1)]
    cluster.on("node4", "kill", "-9", str(run.health("trainer.1")["pid"]))
    assert terminal.wait(60) == 1
    assert re.search(r"error: rl: trainer\.1 on node4 .*SIGKILL", terminal.output), terminal.output[
        -3000:
    ]
    assert "type `snakemake --profile slurm glm5_shape_smoke` to go on from step" in terminal.output
    # Slurm may still be giving its nodes back.
    cluster.wait_until("no job is left", lambda: not cluster.queue(), 30)

    terminal = run.start()
    cluster.wait_until(
        "RL runs again",
        lambda: (
            run.is_in("rl", terminal)
            and all(run.health(f"inference.{i}").get("doing") == "serving" for i in (0, 1))
        ),
        120,
    )
    job, attempt = run.job(), run.status()["attempt"]
    cluster.crash("node4")
    cluster.wait_until(
        "Slurm has put the job back",
        lambda: cluster.state(job) == "PENDING",
        90,
        lambda: terminal.output[-2000:],
    )
    cluster.wait_until(
        "the job runs again",
        lambda: run.status().get("attempt", 0) > attempt and run.status().get("roles"),
        120,
        lambda: terminal.output[-2000:],
    )
    assert {role["node"] for role in run.status()["roles"]} == {"node1", "node2", "node3", "node5"}
    assert terminal.wait(240) == 0, terminal.output[-3000:]
    said = (run.path / "logs" / "launcher.0.log").read_text()
    assert re.search(
        rf"started again by Slurm \(job {job}\): node4 with trainer\.1 was lost; "
        rf"rl goes on from step \d+",
        said,
    ), said
    assert run.receipt()["stages"]["rl"]["restarts"] >= 2
    assert sorted(set(run.steps())) == list(range(1, max(run.steps()) + 1))
    assert not list((run.path / "weights" / "wire").glob("*"))


@pytest.mark.timeout(300)
def test_an_engine_over_two_nodes_returns_routes_and_comes_back(cluster: Cluster, fresh):
    """reverse_text_moe_wide has a node that prefills, two that decode, and one that trains.

    A killed rank of the wide engine is restarted. After the death of its node, Slurm starts the job
    again with the fifth node. `benchmarks/cluster/wide.py` trains on from there, in 204 s in all.
    This test stops earlier, but in CI it shares two cores with other tests.
    """
    run = fresh("reverse_text_moe_wide")
    terminal = run.start()

    def trained() -> list[dict]:
        rows = run.rows("trainer.0") if run.is_in("rl", terminal) else []
        return [row for row in rows if row.get("routes_differ") is not None]

    def wait(what: str, condition) -> None:
        cluster.wait_until(what, condition, 180, lambda: terminal.output[-2000:])

    wait("RL trains", lambda: len(trained()) >= 2)
    nodes = {role["name"]: role["node"] for role in run.status()["roles"]}
    assert len({nodes[name] for name in ("inference.0", "inference.1", "headless.0")}) == 3
    cluster.on(nodes["headless.0"], "kill", "-9", str(run.health("headless.0")["pid"]))
    events = lambda: [row.get("event") for row in run.rows("orchestrator.0")]  # noqa: E731
    wait("the engine serves again", lambda: "engine_healthy" in events())
    before = len(trained())
    wait("RL trains on", lambda: len(trained()) > before + 1)
    attempt, lost = run.status()["attempt"], nodes["headless.0"]
    cluster.crash(lost)
    wait(
        "the job runs again",
        lambda: run.status().get("attempt", 0) > attempt and run.status().get("roles"),
    )
    again = {role["name"]: role["node"] for role in run.status()["roles"]}
    assert again.keys() == nodes.keys() and lost not in again.values()
    assert again["inference.1"] != again["headless.0"]
    said = (run.path / "logs" / "launcher.0.log").read_text()
    assert re.search(rf"started again by Slurm .*: {lost} with headless\.0 was lost; ", said)
    terminal.interrupt()
    assert terminal.wait(60) != 0


SOCKETS = """
import json, sys, psutil, socket
sys.path.insert(0, sys.argv[2])
from listeners import listening, undeclared
roles = {int(pid): role for pid, role in json.loads(sys.argv[1]).items()}
[host] = [a.address for a in psutil.net_if_addrs()["eth0"] if a.family == socket.AF_INET]
found = listening(roles)
print(json.dumps([len(found), undeclared(found, host)]))
"""


def _sockets(cluster: Cluster, run: Run, node: str) -> tuple[int, list[str]]:
    """Return the number of sockets of a node's roles, and sentences about undeclared sockets."""
    names = [role["name"] for role in run.status()["roles"] if role["node"] == node]
    roles = {run.health(name)["pid"]: name.split(".")[0] for name in names}
    python = str(cluster.checkout / ".venv/bin/python")
    words = python, "-c", SOCKETS, json.dumps(roles), str(cluster.checkout / "benchmarks/faults")
    return tuple(json.loads(cluster.on(node, *words).stdout))


def test_ctrl_c_while_queued_and_while_running_leaves_no_job(cluster: Cluster, fresh):
    run = fresh("reverse_text_smoke")
    blocker = cluster.submit(f"--nodes={len(NODES)}", "--exclusive", "--wrap=sleep 300")
    cluster.wait_until("the nodes are taken", lambda: cluster.state(blocker) == "RUNNING", 30)
    terminal = run.start()
    cluster.wait_until(
        "the job waits",
        lambda: "PENDING" in cluster.queue().values(),
        60,
        lambda: terminal.output[-2000:],
    )
    assert "waits for Resources" in run.user(
        "orrery", "status", "reverse_text_smoke"
    ) or "waits for Priority" in run.user("orrery", "status", "reverse_text_smoke")
    terminal.interrupt()
    assert terminal.wait(30) != 0 and "cancelled Slurm job" in terminal.output
    cluster.wait_until("only the blocker is left", lambda: list(cluster.queue()) == [blocker], 20)

    terminal = run.start()
    cluster.wait_until("the job waits", lambda: "PENDING" in cluster.queue().values(), 60)
    assert "cancelled job" in run.user("orrery", "stop", "reverse_text_smoke")
    assert terminal.wait(30) == 1 and "CANCELLED" in terminal.output
    cluster.run("scancel", blocker)

    terminal = run.start()
    cluster.wait_until(
        "sft runs", lambda: run.is_in("sft", terminal), 90, lambda: terminal.output[-2000:]
    )
    terminal.interrupt()
    assert terminal.wait(30) != 0
    cluster.wait_until("no job is left", lambda: not cluster.queue(), 30)
    cluster.wait_until("the launcher says so", lambda: run.status().get("state") == "stopped", 20)
    for node in NODES:
        assert "orrery" not in cluster.on(node, "ps", "-eo", "args").stdout.replace(
            "/srv/orrery-cluster", ""
        ).replace("orrery-node", "")


def test_a_job_outlives_its_snakemake_stops_with_a_checkpoint_and_gives_way_to_a_better_one(
    cluster: Cluster, fresh
):
    run = fresh("reverse_text_smoke")
    terminal = run.start()
    cluster.wait_until(
        "RL trains",
        lambda: run.is_in("rl", terminal) and run.steps(),
        120,
        lambda: terminal.output[-2000:],
    )
    job = run.job()
    terminal.kill()
    terminal = run.start()
    cluster.wait_until(
        "the job is found",
        lambda: f"is Slurm job {job} already, running" in terminal.output,
        30,
        lambda: terminal.output,
    )
    assert list(cluster.queue()) == [job]
    assert "asked job" in run.user("orrery", "stop", run.name, "--checkpoint")
    assert (
        terminal.wait(60) == 1
        and "error: rl: wound down; type `snakemake --profile slurm" in terminal.output
    ), terminal.output[-2000:]
    assert (
        not cluster.queue()
        and run.status()["state"] == "stopped"
        and max(run.checkpoints()) >= len(run.steps()) > 0
    )
    assert "--checkpoint is for" in run.user(
        "orrery", "stop", run.name, "--checkpoint"
    ) or "is not running. Type" in run.user("orrery", "stop", run.name)

    spot = cluster.home / "spot.toml"
    spot.write_text(
        (cluster.checkout / "site.toml")
        .read_text()
        .replace('partition = "gpu"', 'partition = "spot"')
    )
    before = max(run.checkpoints())
    terminal = run.start(ORRERY_SITE=str(spot))
    cluster.wait_until(
        "RL trains again",
        lambda: run.is_in("rl", terminal) and len(run.steps()) > before,
        90,
        lambda: terminal.output[-2000:],
    )
    job = run.job()
    better = cluster.submit(f"--nodes={len(NODES)}", "--exclusive", "--wrap=sleep 5")
    cluster.wait_until(
        "the run gave way",
        lambda: cluster.state(job) == "PENDING",
        60,
        lambda: terminal.output[-2000:],
    )
    assert max(run.checkpoints()) > before
    cluster.wait_until("the better job has run", lambda: cluster.state(better) == "COMPLETED", 60)
    cluster.wait_until(
        "the run goes on",
        lambda: run.status()["state"] == "running" and cluster.state(job) == "RUNNING",
        90,
    )
    terminal.interrupt()
    assert terminal.wait(30) != 0


def test_a_bad_site_file_and_a_missing_image_are_one_sentence_before_anything_is_submitted(
    cluster: Cluster, fresh
):
    run = fresh("reverse_text_smoke")
    site = (cluster.checkout / "site.toml").read_text()
    bad = cluster.home / "bad.toml"
    bad.write_text(site.replace("partition", "partitoin"))
    refused = cluster.run(*SLURM, run.name, check=False, env={"ORRERY_SITE": str(bad)})
    assert (
        refused.returncode
        and "slurm.partitoin: there is no such key; did you mean 'partition'?" in refused.stderr
    )
    assert "Traceback" not in refused.stderr
    bad.write_text(re.sub(r'images = ".*"', 'images = "nowhere"', site))
    refused = cluster.run(*SLURM, run.name, check=False, env={"ORRERY_SITE": str(bad)})
    assert refused.returncode and re.search(
        r"error: .*reverse_text_smoke.* init: .*nowhere.*snakemake -s pipelines/images\.smk",
        refused.stderr,
    ), refused.stderr
    bad.write_text(site.replace('account = "lab"', 'account = "nobody"'))
    refused = cluster.run(*SLURM, run.name, check=False, env={"ORRERY_SITE": str(bad)})
    assert (
        refused.returncode and "sbatch: " in refused.stderr and "account" in refused.stderr.lower()
    )
    assert not cluster.queue()


def test_a_full_disk_ends_the_run_with_a_sentence_and_damages_no_checkpoint(
    cluster: Cluster, fresh
):
    run = fresh("reverse_text_smoke")
    folder = cluster.run("orrery", "plan", run.name, "init").stdout.split()[2].rstrip(":")
    on_disk = cluster.small_disk / folder
    cluster.run("mkdir", str(on_disk))
    cluster.run("mkdir", "-p", "runs")
    cluster.run("ln", "-s", str(on_disk), f"runs/{folder}")
    terminal = run.start()
    cluster.wait_until(
        "a checkpoint is whole", lambda: [*on_disk.glob("checkpoints/**/COMPLETE")], 200
    )
    with suppress(OSError), (cluster.small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 16))
    assert terminal.wait(200) == 1
    assert re.search(
        r"error: .*(no space left|disk is full|cannot be written)", terminal.output, re.IGNORECASE
    ), terminal.output[-3000:]
    assert "Traceback" not in terminal.output
    whole = [marker.parent for marker in on_disk.glob("checkpoints/**/COMPLETE")]
    assert whole
    for folder in whole:
        checked = (
            "from pathlib import Path; from orrery.wire.checkpoints import verify; "
            "import sys; verify(Path(sys.argv[1]))"
        )
        image = next(cluster.images.glob("trainer-cpu-*.sif"))
        code = next((on_disk / "code").iterdir())
        bind = ("--bind", f"{code}:/orrery/code", "--bind", str(on_disk))
        cluster.run(
            "apptainer", "-s", "exec", *bind, str(image), "python3", "-c", checked, str(folder)
        )
    assert not cluster.queue()


def test_what_is_typed_on_the_page_about_clusters_works(cluster: Cluster):
    """Every command of docs/cluster.md that the tests above do not type."""
    doctor = cluster.run("orrery", "doctor", check=False, timeout_s=120)
    lines = doctor.stdout.splitlines()
    assert not [line for line in lines if line.startswith("FAIL")], doctor.stdout
    assert any(line.startswith("ok   Slurm") for line in lines)
    began = time.monotonic()
    refused = cluster.run(*SLURM, "-n", "glm5_run", check=False, timeout_s=60)
    assert "slurm.memory_per_node_mb is" in refused.stdout + refused.stderr
    assert refused.returncode == 1 and time.monotonic() - began < 15
    larger = "sed 's/^memory_per_node_mb.*/memory_per_node_mb = 1900000/' site.toml >larger.toml"
    typed = shlex.join([*SLURM, "-n", "glm5_run"])
    shown = cluster.run("bash", "-c", f"{larger}; ORRERY_SITE=larger.toml {typed}", timeout_s=60)
    assert "28 nodes" in shown.stdout + shown.stderr
    assert "trainer.0-95" in cluster.run("orrery", "plan", "glm5_run", "rl").stdout
    assert not cluster.queue()
