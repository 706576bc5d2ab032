"""The simulated cluster: real Slurm, and nodes that share only a file system."""

from simulated import NODES, Cluster

SPREAD = ("-N2", "--ntasks-per-node=1", "-w", "node[1-2]")


def test_one_task_runs_on_every_node_as_the_user(cluster: Cluster):
    lines = cluster.run(
        "srun", f"-N{len(NODES)}", "bash", "-c", "echo $(hostname) $(id -un)"
    ).stdout.splitlines()
    assert sorted(lines) == [f"{node} {cluster.login}" for node in NODES]


def test_a_login_is_on_the_head_in_the_checkout(cluster: Cluster):
    assert cluster.run("bash", "-c", "hostname; id -un; pwd").stdout.split() == [
        "head",
        cluster.login,
        str(cluster.checkout),
    ]


def test_a_node_has_eight_gpus_and_not_nine(cluster: Cluster):
    lines = cluster.run(
        "srun", "-N2", "--gpus-per-node=8", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"
    ).stdout.split()
    assert lines == ["0,1,2,3,4,5,6,7"] * 2
    assert cluster.run("srun", "-N1", "--gres=gpu:9", "true", check=False).returncode != 0


def test_the_components_of_a_heterogeneous_job_run_together_on_different_nodes(cluster: Cluster):
    command = (
        "srun",
        "-N1",
        "--gres=gpu:4",
        "hostname",
        ":",
        "-N2",
        "--gpus-per-node=8",
        "hostname",
    )
    assert len(set(cluster.run(*command).stdout.split())) == 3


def test_nodes_reach_one_another_by_name_and_nothing_outside(cluster: Cluster):
    assert cluster.run("srun", "-N1", "-w", "node1", "ping", "-c1", "-W5", "node3").returncode == 0
    routes = cluster.run("srun", "-N1", "-w", "node1", "ip", "route").stdout.splitlines()
    assert len(routes) == 1 and routes[0].startswith("10.77.0.0/24 dev eth0")


def test_loopback_shared_memory_tmp_and_processes_of_a_node_are_its_own(cluster: Cluster):
    serve = "touch /tmp/mine /dev/shm/mine && exec python3 -m http.server --bind 127.0.0.1 8123"
    cluster.start("srun", "-N1", "-w", "node1", "bash", "-c", serve)
    look = "ls /tmp /dev/shm; pgrep -x python3; exec 3<>/dev/tcp/127.0.0.1/8123 && echo reached"
    on_first = ("srun", "--overlap", "-N1", "-w", "node1", "bash", "-c", look)
    cluster.wait_until(
        "the server on node1 answers there",
        lambda: "reached" in cluster.run(*on_first, check=False).stdout,
        20,
    )
    there = cluster.run(*on_first).stdout.split()
    assert there.count("mine") == 2 and any(word.isdigit() for word in there)
    elsewhere = cluster.on("node2", "bash", "-c", look, check=False)
    seen = [word for word in elsewhere.stdout.split() if "orrery-kernels-" not in word]
    assert seen == ["/dev/shm:", "/tmp:"] and "refused" in elsewhere.stderr


def test_a_rename_on_one_node_is_seen_on_all(cluster: Cluster):
    folder = cluster.checkout / "runs" / "rename"
    cluster.run(
        "srun",
        "-N1",
        "-w",
        "node2",
        "bash",
        "-c",
        f"mkdir -p {folder} && echo x >{folder}/new && mv {folder}/new {folder}/seen",
    )
    assert cluster.run("srun", "-N4", "cat", str(folder / "seen")).stdout.split() == ["x"] * 4


def test_a_task_that_takes_more_memory_than_it_asked_for_is_killed_as_such(cluster: Cluster):
    job = cluster.submit("-N1", "--mem=100", "--wrap", "python3 -c 'b = bytearray(400_000_000)'")
    cluster.wait_until(
        "the job ended", lambda: cluster.state(job) not in ("PENDING", "RUNNING", "COMPLETING"), 40
    )
    assert cluster.state(job) == "OUT_OF_MEMORY"


def test_accounting_holds_the_exit_code(cluster: Cluster):
    job = cluster.submit("-N1", "--wrap", "exit 7")
    rows = cluster.wait_until(
        "sacct has the end",
        lambda: [r for r in cluster.accounting(job, "-X") if r.state == "FAILED"],
        20,
    )
    assert [row.exit_code for row in rows] == ["7:0"]


def test_an_account_that_does_not_exist_is_refused(cluster: Cluster):
    assert (
        "Invalid account"
        in cluster.run("sbatch", "--account=nobody", "--wrap", "true", check=False).stderr
    )


def test_ctrl_c_ends_what_is_typed_at_the_terminal(cluster: Cluster):
    command = cluster.start(
        "python3", "-c", "import time; print('begun', flush=True); time.sleep(100)"
    )
    cluster.wait_until("it has begun", lambda: "begun" in command.output, 20)
    command.interrupt()
    assert command.wait(20) != 0 and "KeyboardInterrupt" in command.output


def test_an_image_runs_as_the_user_on_a_node_and_sees_no_other_folders(cluster: Cluster):
    image = cluster.any_image()
    command = (
        "apptainer",
        "-s",
        "exec",
        "--contain",
        "--cleanenv",
        str(image),
        "sh",
        "-c",
        f"id -u; hostname; ls {cluster.checkout}",
    )
    done = cluster.run("srun", "-N1", "-w", "node2", *command, check=False)
    assert (
        done.stdout.split() == [cluster.run("id", "-u").stdout.strip(), "node2"]
        and "No such file" in done.stderr
    )
