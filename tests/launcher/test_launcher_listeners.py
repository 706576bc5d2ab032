"""The list of a run's listeners: every socket outside it is found."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from listeners import LISTENERS, listening, table, undeclared

LOOPBACK = "127.0.0.1"
# A process that listens on the sockets in its arguments until its standard input ends.
LISTENS = """
import socket, sys
held = []
for family, kind, address in eval(sys.argv[1]):
    held.append(socket.socket(getattr(socket, family), getattr(socket, kind)))
    held[-1].bind(address)
    if kind == "SOCK_STREAM":
        held[-1].listen()
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def process(*sockets, before=()):
    """Yield the pid of a new process that listens on `sockets`; this one may have older sockets."""
    words = [*before, sys.executable, "-c", LISTENS, repr(sockets)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"\n"
        yield child.pid
        child.stdin.close()


def tcp(address=LOOPBACK, port=0):
    return "AF_INET", "SOCK_STREAM", (address, port)


def sentences(role, *sockets):
    with process(*sockets) as pid:
        return undeclared(listening({pid: role}), LOOPBACK)


@pytest.mark.parametrize("num_sockets", [0, 1, 2])
def test_sockets_that_are_declared_are_fine(num_sockets):
    assert sentences("orchestrator", *[tcp()] * num_sockets) == []


def test_one_socket_more_than_is_declared_is_found():
    [sentence] = sentences("orchestrator", tcp(), tcp(), tcp())
    assert "orchestrator" in sentence and "LISTENERS has 2" in sentence


def test_a_role_that_listens_nowhere_may_not_begin_to():
    [sentence] = sentences("report", tcp())
    assert "is in no row of LISTENERS" in sentence


@pytest.mark.parametrize(
    "socket",
    [
        tcp("0.0.0.0"),
        tcp("127.0.0.2"),
        ("AF_INET", "SOCK_DGRAM", ("0.0.0.0", 0)),
        ("AF_INET6", "SOCK_STREAM", ("::", 0)),
        ("AF_UNIX", "SOCK_STREAM", "\0orrery-test"),
    ],
)
def test_every_interface_another_address_datagrams_and_abstract_names_are_found(socket):
    [sentence] = sentences("trainer", socket)
    assert "is in no row of LISTENERS" in sentence


def test_a_unix_socket_is_for_roles_that_have_declared_one(tmp_path):
    assert sentences("inference", ("AF_UNIX", "SOCK_STREAM", str(tmp_path / "one"))) == []
    assert len(sentences("orchestrator", ("AF_UNIX", "SOCK_STREAM", str(tmp_path / "two")))) == 1


def test_what_a_child_listens_on_is_its_roles():
    code = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    words = [sys.executable, "-c", code, sys.executable, "-c", LISTENS, repr([tcp()])]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"\n"
        [sentence] = undeclared(listening({parent.pid: "orchestrator"}), LOOPBACK)
        assert "of orchestrator listens on" in sentence and f"pid {parent.pid}" not in sentence
        parent.stdin.close()


@pytest.mark.skipif(
    subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0,
    reason="NOT TESTED: another network namespace",
)
def test_sockets_of_another_network_namespace_are_read_as_that_one_has_them():
    with process(tcp("0.0.0.0", 777), before=("unshare", "-n")) as pid:
        [found] = [one for one in listening({pid: "trainer"}) if one.port]
        assert (found.address, found.port) == ("0.0.0.0", 777)


def test_the_page_about_security_shows_the_list():
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert table() in page and len(LISTENERS) > 10
