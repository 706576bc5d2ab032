"""The site file: allowed values, and one sentence for each refused value."""

import pytest

from orrery.launcher.site import VARIABLE, Site, check_network, cluster, load_site
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace

GOOD = """
[slurm]
partition = "gpu"
account = "lab"
time_limit_min = 60
gpu_type = "h200"
cpus_per_node = 64
memory_per_node_mb = 60000
extra = ["--exclusive", "--qos=high"]
[containers]
images = "images"
mounts = ["/scratch", "/data:/data:ro"]
modules = ["apptainer/1.4"]
[network]
interface = "ib0"
[roles]
deadline_scale = 2.0
[environment]
NCCL_IB_HCA = "mlx5"
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    return Workspace(tmp_path)


def sentence(workspace, text):
    (workspace.root / "site.toml").write_text(text)
    with pytest.raises(OrreryError) as caught:
        load_site(workspace)
    message = str(caught.value)
    assert message.startswith("site.toml: ") and "\n" not in message
    return message


def test_a_whole_site(workspace):
    (workspace.root / "site.toml").write_text(GOOD)
    site = load_site(workspace)
    assert site.slurm.extra == ("--exclusive", "--qos=high") and site.slurm.warning_s == 300
    assert (
        site.containers.mounts == ("/scratch", "/data:/data:ro") and site.network.interface == "ib0"
    )
    assert site.roles.deadline_scale == 2.0 and site.environment == {"NCCL_IB_HCA": "mlx5"}


def test_no_file_is_this_machine_alone(workspace):
    site = load_site(workspace)
    assert (site.slurm, site.containers, site.network) == (None, None, None)
    with pytest.raises(
        OrreryError,
        match=r"site\.toml: does not exist, and its .*cp docs/site\.example\.toml site\.toml",
    ):
        cluster(workspace)


def test_the_variable_names_another_file(workspace, tmp_path, monkeypatch):
    other = tmp_path / "elsewhere.toml"
    other.write_text(GOOD)
    monkeypatch.setenv(VARIABLE, str(other))
    assert cluster(workspace).partition == "gpu"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent.toml"))
    with pytest.raises(OrreryError, match="cannot be read"):
        load_site(workspace)


@pytest.mark.parametrize(
    "before, after, words",
    [
        ("partition", "partion", "slurm.partion: there is no such key; did you mean 'partition'?"),
        ('partition = "gpu"\n', "", "slurm.partition: is missing"),
        ('"gpu"', "3", "slurm.partition: "),
        ('"gpu"', '"g u"', "'g u' is not a name"),
        ("[slurm]", "[slurmd]", "slurmd: there is no such key; did you mean 'slurm'?"),
        (
            "time_limit_min = 60",
            "time_limit_min = 5",
            "warning_s 300 is not below the time limit of 300 s",
        ),
        ("time_limit_min = 60", "time_limit_min = 0", "slurm.time_limit_min: "),
        ('"--exclusive"', '"--nodes=3"', "'--nodes=3' is set from the manifest"),
        ('"--exclusive"', '"--gres=gpu:2"', "'--gres=gpu:2' is set from the manifest"),
        ('"--exclusive"', '"--licenses=x y"', "is not one sbatch option"),
        ('"--exclusive"', '"exclusive"', "is not one sbatch option"),
        (
            '["--exclusive", "--qos=high"]',
            '"--exclusive"',
            "slurm.extra: '--exclusive' is not a list",
        ),
        (
            "time_limit_min = 60",
            'time_limit_min = "24:00:00"',
            "slurm.time_limit_min: '24:00:00' is not a whole number",
        ),
        (
            'NCCL_IB_HCA = "mlx5"',
            "NCCL_DEBUG = 1",
            "environment.NCCL_DEBUG: 1 is not a text; put it in quotes",
        ),
        (
            'images = "images"',
            'images = "images"\nscratch = "tmp x"',
            "containers.scratch: 'tmp x' is not a valid value",
        ),
        ('partition = "gpu"', "partition = gpu", "Texts need quotes"),
        ('"/scratch"', '"scratch"', "'scratch' is not 'SRC'"),
        ('"ib0"', '"ib 0"', "network.interface: "),
        ("deadline_scale = 2.0", "deadline_scale = 0.0", "roles.deadline_scale: "),
        ("NCCL_IB_HCA", "ORRERY_TOKEN", "ORRERY_TOKEN is set by the launcher"),
        ("NCCL_IB_HCA", "WANDB_API_KEY", "looks like a secret"),
        ("[network]", "[network", "not TOML"),
    ],
)
def test_a_mistake_is_one_sentence(workspace, before, after, words):
    assert before in GOOD
    assert words in sentence(workspace, GOOD.replace(before, after, 1))


@pytest.mark.parametrize(
    "option",
    [
        "-N2",
        "-n8",
        "-c64",
        "-t1",
        "-pother",
        "-W",
        "-p=x",
        "--part=x",
        "--sign=USR1@5",
        "--wait",
        "-vN2",
    ],
)
def test_a_reserved_option_is_refused_in_its_short_and_abbreviated_forms(workspace, option):
    text = GOOD.replace("--exclusive", option)
    assert f"{option!r} is set from the manifest" in sentence(workspace, text)


@pytest.mark.parametrize("option", ["--wait-all-nodes=1", "--mem-bind=local", "-x", "--no-kill"])
def test_an_option_that_only_begins_like_a_reserved_one_is_allowed(workspace, option):
    (workspace.root / "site.toml").write_text(GOOD.replace("--exclusive", option))
    assert option in load_site(workspace).slurm.extra


def test_options_with_signs_of_slurm_are_options(workspace):
    (workspace.root / "site.toml").write_text(
        GOOD.replace('"--exclusive"', '"--constraint=a&b|c", "--licenses=x:2"')
    )
    assert load_site(workspace).slurm.extra[:2] == ("--constraint=a&b|c", "--licenses=x:2")


def test_a_home_is_a_home_and_a_file_that_is_no_text_is_one_sentence(workspace):
    (workspace.root / "site.toml").write_text(GOOD.replace('"images"', '"~/images"'))
    assert load_site(workspace).containers.images.startswith("/")
    (workspace.root / "site.toml").write_bytes(b"\xff\xfe[slurm]")
    with pytest.raises(OrreryError, match="not UTF-8"):
        load_site(workspace)


def test_several_nodes_need_a_network():
    check_network(Site(), 1, "rl of x")
    with pytest.raises(OrreryError, match="rl of x has 4 nodes, but the site file has no"):
        check_network(Site(), 4, "rl of x")


def test_lines_before_the_launcher_hold_no_secrets(workspace):
    text = GOOD.replace("[containers]", 'pre_run = ["export WANDB_API_KEY=1"]\n[containers]')
    assert "looks like a secret" in sentence(workspace, text)
    text = text.replace("WANDB_API_KEY", "TOKENIZERS_PARALLELISM")
    (workspace.root / "site.toml").write_text(text)
    slurm = load_site(workspace).slurm
    assert slurm is not None and slurm.pre_run == ("export TOKENIZERS_PARALLELISM=1",)
