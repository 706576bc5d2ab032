"""Mutual TLS: a run's sites meet, and strangers are turned away."""

import socket
import ssl
import stat
import threading

import pytest

from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.types import ElasticError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("certificates")
    make_authority(made, "run-0")
    for site in ("paris", "tokyo"):
        make_site(made, site)
    return made


def meet(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """Return a byte that the server sends after its handshake. Raise the client's error."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as connection:
                connection.sendall(b"x")
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours) as connection:
            return connection.recv(1)
    finally:
        ours.close()
        thread.join()


def test_two_sites_of_a_run_meet(folder):
    paris, tokyo = (Certificates.of(folder, site) for site in ("paris", "tokyo"))
    assert meet(paris.server(), tokyo.client()) == b"x"


def test_sites_of_another_run_and_clients_without_certificate_get_nothing(folder, tmp_path):
    make_authority(tmp_path, "run-0")
    stranger = make_site(tmp_path, "paris")
    ours = Certificates.of(folder, "paris")
    nameless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nameless.check_hostname, nameless.verify_mode = False, ssl.CERT_NONE
    for client in (stranger.client(), nameless):
        with pytest.raises(OSError):
            assert meet(ours.server(), client) == b"x"
    with pytest.raises(ssl.SSLError):
        meet(stranger.server(), ours.client())


def test_keys_are_private_and_never_replaced(folder):
    for name in ("authority", "paris"):
        assert stat.S_IMODE((folder / f"{name}.key").stat().st_mode) == 0o600
    with pytest.raises(ElasticError, match=r"authority\.key exists"):
        make_authority(folder, "run-0")
    with pytest.raises(ElasticError, match=r"paris\.key exists"):
        make_site(folder, "paris")


def test_bad_input_is_one_sentence(folder):
    with pytest.raises(ElasticError, match=r"oslo\.pem is missing"):
        Certificates.of(folder, "oslo")
    with pytest.raises(ElasticError, match="cannot name files"):
        make_site(folder, "../oslo")
