"""Network, deadline scale and preemption requests."""

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.runtime import network, process_control
from orrery.runtime.role_context import parse_role
from orrery.runtime.timing import scaled


@pytest.fixture
def environ(monkeypatch):
    for name in (
        "ORRERY_INTERFACE",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "UCX_NET_DEVICES",
        "NO_PROXY",
        "no_proxy",
        "ORRERY_DEADLINE_SCALE",
    ):
        monkeypatch.delenv(name, raising=False)
    copy = os.environ.copy()
    monkeypatch.setattr(os, "environ", copy)
    return copy


def addresses(**interfaces):
    """What `psutil.net_if_addrs` says of them, as far as it is read."""
    return {
        name: [
            SimpleNamespace(family=socket.AF_INET6, address="fe80::1"),
            *([SimpleNamespace(family=socket.AF_INET, address=ip)] if ip else []),
        ]
        for name, ip in interfaces.items()
    }


def test_a_role_listens_on_loopback_unless_an_interface_is_named(environ, tmp_path, monkeypatch):
    assert parse_role("trainer", ["--run-dir", str(tmp_path), "--stage", "rl"]).host == "127.0.0.1"
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses(lo="127.0.0.1", ib0="10.1.2.3"))
    environ["ORRERY_INTERFACE"] = "ib0"
    assert parse_role("trainer", ["--run-dir", str(tmp_path), "--stage", "rl"]).host == "10.1.2.3"


@pytest.mark.parametrize("name", ["ib9", "down0"])
def test_an_interface_that_cannot_be_used_is_a_sentence_with_those_that_can(
    environ, monkeypatch, name
):
    monkeypatch.setattr(
        psutil, "net_if_addrs", lambda: addresses(lo="127.0.0.1", ib0="10.1.2.3", down0=None)
    )
    environ["ORRERY_INTERFACE"] = name
    with pytest.raises(
        OrreryError,
        match=rf"ORRERY_INTERFACE: {name} has no IPv4 address on .*, "
        r"which has ib0 \(10\.1\.2\.3\), lo \(127\.0\.0\.1\); set",
    ):
        network.address()


def test_gloo_and_nccl_get_the_interface_by_name_and_keep_what_the_site_chose(environ):
    network.name_interface()
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    environ.update(ORRERY_INTERFACE="ib0", NCCL_SOCKET_IFNAME="=ib1")
    del environ["GLOO_SOCKET_IFNAME"]
    network.name_interface()
    assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=ib1")


def test_ports_are_distinct_free_and_below_the_ephemeral_range():
    with socket.socket() as taken:
        (port,) = network.free_ports(1, seed=3)
        taken.bind(("127.0.0.1", port))
        ports = network.free_ports(50, seed=3)
    assert (
        len(set(ports)) == 50 and port not in ports and all(one in network.PORTS for one in ports)
    )


def test_ports_that_do_not_suffice_are_a_sentence(monkeypatch):
    (port,) = network.free_ports(1)
    monkeypatch.setattr(network, "PORTS", range(port, port + 1))
    assert network.free_ports(1) == [port]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        with pytest.raises(
            RunFailed, match=rf"ports {port} to {port}: 127.0.0.1 has 0 free, but 1 are needed"
        ):
            network.free_ports(1)


def test_peers_are_spoken_to_without_the_sites_proxy(environ):
    environ["no_proxy"] = "intranet,10.1.2.3"
    network.without_proxy(["10.1.2.3", "10.1.2.4", "10.1.2.4"])
    assert environ["NO_PROXY"] == environ["no_proxy"] == "intranet,10.1.2.3,10.1.2.4"


def test_deadlines_are_multiplied_by_what_the_site_says(environ):
    assert scaled(60) == 60
    environ["ORRERY_DEADLINE_SCALE"] = "2.5"
    assert scaled(60) == 150
    for wrong in ("", "0", "-1", "nan", "inf", "two"):
        environ["ORRERY_DEADLINE_SCALE"] = wrong
        with pytest.raises(
            OrreryError, match=f"ORRERY_DEADLINE_SCALE: '{wrong}' is not a positive number"
        ):
            scaled(60)


def test_only_the_rl_stage_winds_down_and_only_when_its_file_is_there(tmp_path):
    assert not process_control.preemption_requested(tmp_path, "rl")
    for stage in ("rl", "sft"):
        process_control.request_path(tmp_path, stage).parent.mkdir(parents=True)
        assert not process_control.preemption_requested(tmp_path, stage)
        process_control.request_path(tmp_path, stage).touch()
    assert process_control.preemption_requested(
        tmp_path, "rl"
    ) and not process_control.preemption_requested(tmp_path, "sft")


def test_ucx_uses_our_interface_and_every_port_of_every_rdma_device(environ, tmp_path, monkeypatch):
    monkeypatch.setattr(network, "RDMA_DEVICES", tmp_path / "infiniband")
    for port in ("mlx5_0/ports/1", "mlx5_1/ports/1", "mlx5_1/ports/2"):
        (tmp_path / "pci" / port).mkdir(parents=True)
    environ["ORRERY_INTERFACE"] = "ib0"
    network.name_ucx_devices()
    assert environ["UCX_NET_DEVICES"] == "ib0"
    (tmp_path / "infiniband").mkdir()
    for device in ("mlx5_0", "mlx5_1"):  # the kernel has links there
        (tmp_path / "infiniband" / device).symlink_to(tmp_path / "pci" / device)
    network.name_ucx_devices()
    assert environ["UCX_NET_DEVICES"] == "ib0", "a site has said so"
    del environ["UCX_NET_DEVICES"]
    network.name_ucx_devices()
    assert environ["UCX_NET_DEVICES"] == "ib0,mlx5_0:1,mlx5_1:1,mlx5_1:2"
