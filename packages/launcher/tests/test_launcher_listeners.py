"""The list of a run's listeners: what is not in it is found, whatever it is."""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from orrery.launcher.listeners import LISTENERS, listening, table, undeclared

LOOPBACK = "127.0.0.1"


def sentences(role, host=LOOPBACK):
    return undeclared(listening({os.getpid(): role}), host)


@pytest.fixture
def opened():
    """`open(address, kind, family)` is a socket of this process that listens until the test ends."""
    with ExitStack() as held:

        def open(address, kind=socket.SOCK_STREAM, family=socket.AF_INET):
            one = held.enter_context(socket.socket(family, kind))
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            return one

        yield open


def test_a_process_that_listens_on_nothing_is_fine():
    assert sentences("orchestrator") == []


def test_sockets_that_are_declared_are_fine_and_one_more_is_not(opened):
    for _ in range(2):
        opened((LOOPBACK, 0))
        assert sentences("orchestrator") == []
    opened((LOOPBACK, 0))
    [sentence] = sentences("orchestrator")
    assert "orchestrator" in sentence and "LISTENERS has 2" in sentence


def test_a_role_that_listens_nowhere_may_not_begin_to(opened):
    opened((LOOPBACK, 0))
    assert "is in no row of LISTENERS" in sentences("report")[0]


@pytest.mark.parametrize(
    ("address", "kind", "family"),
    [
        (("0.0.0.0", 0), socket.SOCK_STREAM, socket.AF_INET),
        (("127.0.0.2", 0), socket.SOCK_STREAM, socket.AF_INET),
        (("0.0.0.0", 0), socket.SOCK_DGRAM, socket.AF_INET),
        (("::", 0), socket.SOCK_STREAM, socket.AF_INET6),
        ("\0orrery-test", socket.SOCK_STREAM, socket.AF_UNIX),
    ],
)
def test_every_interface_another_address_datagrams_and_abstract_names_are_found(opened, address, kind, family):
    opened(address, kind, family)
    [sentence] = sentences("trainer")
    assert "is in no row of LISTENERS" in sentence


def test_a_unix_socket_is_for_roles_that_have_declared_one(opened, tmp_path):
    opened(str(tmp_path / "s"), family=socket.AF_UNIX)
    assert sentences("inference") == []
    assert len(sentences("orchestrator")) == 1


def test_what_a_child_listens_on_is_its_roles():
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        [sentence] = sentences("orchestrator")
        assert f"pid {child.pid}" in sentence
        child.stdin.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: another network namespace, which needs root")
def test_sockets_of_another_network_namespace_are_read_as_that_one_has_them():
    code = "import socket, sys; s = socket.create_server(('0.0.0.0', 777)); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(["unshare", "-n", sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        [found] = [one for one in listening({child.pid: "trainer"}) if one.port]
        assert (found.address, found.port) == ("0.0.0.0", 777)
        child.stdin.close()


def test_the_page_about_security_shows_the_list():
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    assert table() in page and len(LISTENERS) > 10
