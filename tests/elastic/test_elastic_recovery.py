"""Snapshots and recovery: damage, truncation, dead donors, resumed fetches, killed processes."""

import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.keeper import KeeperOptions, SnapshotKeeper, SnapshotServer
from orrery.elastic.snapshots import (
    HEADER,
    Block,
    BlockLacking,
    FetchFailed,
    FolderSource,
    PeerSource,
    StateSnapshot,
    assemble,
    copy_state,
    fetch_state,
    publish_copies,
    published,
    read_header,
    verify,
)
from orrery.elastic.types import ElasticError

BLOCK = 1000


def state(seed: int = 0) -> dict[str, memoryview]:
    draw = np.random.default_rng(seed)
    sizes = {"theta": 5000, "momentum": 4321, "inner.0": 2500, "empty": 0}
    return {name: memoryview(draw.bytes(size)) for name, size in sizes.items()}


def snapshot(folder: Path, number: int = 3, **parts: memoryview) -> Path:
    copy_state(folder, number, f"digest {number}", state() | parts, {"step": 40}, BLOCK)
    return publish_copies(folder, keep=2)[0]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


class Counted(FolderSource):
    """A donor that fails after a number of blocks."""

    def __init__(self, folder: Path, most: int = 1000) -> None:
        super().__init__(folder)
        self.num_read, self._most = 0, most

    def read(self, block: Block) -> bytes:
        if self.num_read == self._most:
            raise ConnectionResetError("the donor died")
        self.num_read += 1
        return super().read(block)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    make_authority(folder, "run")
    return make_site(folder, "site")


@pytest.fixture
def serve(files):
    servers = []

    def start(folder: Path) -> str:
        server = SnapshotServer(folder, "127.0.0.1", 0, files)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_snapshot_returns_every_part_and_fact(tmp_path):
    found = snapshot(tmp_path)
    header = verify(found)
    assert (header.round, header.digest, header.facts) == (3, "digest 3", {"step": 40})
    for name, part in state().items():
        assert (found / name).read_bytes() == part


@pytest.mark.parametrize("part", ["theta", "momentum", "inner.0"])
def test_a_flipped_byte_and_a_truncated_part_are_refused_by_name(tmp_path, part):
    found = snapshot(tmp_path)
    flip(found / part, 2100)
    with pytest.raises(ElasticError, match=f"{part}: block 2 is damaged or missing; remove"):
        verify(found)
    flip(found / part, 2100)
    verify(found)
    (found / part).write_bytes((found / part).read_bytes()[:1500])
    with pytest.raises(ElasticError, match=f"{part}: block 1 is damaged or missing; remove"):
        verify(found)


def test_a_damaged_block_is_taken_from_another_donor(tmp_path):
    bad, good = snapshot(tmp_path / "a"), snapshot(tmp_path / "b")
    flip(bad / "theta", 0)
    got = assemble(read_header(good), tmp_path / "c", [FolderSource(bad), FolderSource(good)])
    assert verify(got) == read_header(good)
    with pytest.raises(ElasticError, match="a block of theta has another sha256"):
        assemble(read_header(good), tmp_path / "d", [FolderSource(bad)])
    assert published(tmp_path / "d") == []


def test_a_fetch_goes_on_when_a_donor_dies_and_resumes_after_all_have(tmp_path):
    donor = snapshot(tmp_path / "a")
    header, into = read_header(donor), tmp_path / "b"
    num_blocks = len(list(header.blocks()))
    with pytest.raises(FetchFailed, match="the next try resumes") as failed:
        assemble(header, into, [Counted(donor, 4), Counted(donor, 3)])
    assert failed.value.num_fetched == 7
    assert published(into) == []
    last = Counted(donor)
    verify(assemble(header, into, [last, Counted(donor, 0)]))
    assert last.num_read == num_blocks - 7


def test_two_donors_share_the_blocks_and_each_gives_its_own_inner_state(tmp_path, files, serve):
    one = snapshot(tmp_path / "a")
    other = snapshot(tmp_path / "b", **{"inner.0": memoryview(b"x" * 2500)})
    header = read_header(one)
    peers = [PeerSource(serve(tmp_path / each), files) for each in ("a", "b")]
    assert peers[0].newest() == header and peers[1].newest() == read_header(other)
    own = next(block for block in header.blocks() if block.part == "inner.0")
    with pytest.raises(BlockLacking):
        peers[1].read(own)
    got = assemble(header, tmp_path / "c", peers)
    assert verify(got) == header
    for peer in peers:
        peer.close()


def test_a_joiner_waits_for_the_state_that_the_log_names(tmp_path, files, serve):
    snapshot(tmp_path / "a", 3)
    peer = serve(tmp_path / "a")
    with pytest.raises(ElasticError, match="has round 3, and the run is at round 4"):
        fetch_state(lambda: [peer], lambda: (4, "digest 4"), tmp_path / "b", files, 0.0)
    with pytest.raises(ElasticError, match="the run is at round 3"):
        fetch_state(lambda: [peer], lambda: (3, "other"), tmp_path / "b", files, 0.0)

    def wanted() -> tuple[int, str]:
        snapshot(tmp_path / "a", 4)  # appears while the joiner asks
        return 4, "digest 4"

    got = fetch_state(lambda: [peer], wanted, tmp_path / "b", files, 10.0)
    assert verify(got).round == 4


def test_a_site_that_went_back_offers_the_rounds_of_its_new_history(tmp_path, files, serve):
    for number in (3, 4, 5):
        snapshot(tmp_path / "a", number)
    peer = serve(tmp_path / "a")
    lost = fetch_state(lambda: [peer], lambda: (5, "digest 5"), tmp_path / "b", files, 0.0)
    snapshot(tmp_path / "a", 3)
    assert [path.name[-1] for path in published(tmp_path / "a")] == ["3"]
    for number in (4, 5):
        snapshot(tmp_path / "a", number, theta=memoryview(b"y" * 5000))
    found = fetch_state(lambda: [peer], lambda: (5, "digest 5"), tmp_path / "c", files, 0.0)
    assert verify(found) != read_header(lost)


def test_a_stranger_gets_nothing_and_disturbs_no_fetch(tmp_path, files, serve):
    snapshot(tmp_path / "a")
    peer = serve(tmp_path / "a")
    make_authority(tmp_path / "other", "run")
    stranger = PeerSource(peer, make_site(tmp_path / "other", "site"))
    with pytest.raises(OSError):
        stranger.newest()
    address, _, port = peer.rpartition(":")
    with socket.create_connection((address, int(port))) as silent:
        silent.sendall(b"GET /newest HTTP/1.1\r\n\r\n")
        got = fetch_state(lambda: [peer], lambda: (3, "digest 3"), tmp_path / "b", files, 0.0)
    assert verify(got).round == 3


def test_a_fetch_ends_at_once_when_peers_have_only_newer_states(tmp_path, serve, files):
    snapshot(tmp_path / "a")
    peer, begin_s = serve(tmp_path / "a"), time.monotonic()
    with pytest.raises(ElasticError, match=r"no state of round 2 .* has round 3, and the run is"):
        fetch_state(lambda: [peer], lambda: (2, "digest 2"), tmp_path / "b", files, 60.0)
    assert time.monotonic() - begin_s < 20.0


def test_strangers_hold_no_more_threads_than_allowed(tmp_path, serve, monkeypatch):
    monkeypatch.setattr("orrery.elastic.keeper.MAX_STRANGERS", 2)
    address, _, port = serve(tmp_path).rpartition(":")
    with ExitStack() as stack:
        for _ in range(3):
            last = stack.enter_context(socket.create_connection((address, int(port)), 3.0))
        with suppress(ConnectionResetError):
            assert last.recv(1) == b""


ENDLESS = b"".join(b"3e8\r\n" + bytes(1000) + b"\r\n" for _ in range(100))
BAD_ANSWERS = {
    "no length": b"\r\n" + bytes(1000),
    "a negative length": b"Content-Length: -1\r\n\r\n" + bytes(5000),
    "chunks without end": b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n" + ENDLESS,
    "too few bytes": b"Content-Length: 1000\r\n\r\n" + bytes(10),
    "silence": b"",
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_peer_that_answers_badly_is_left_and_holds_up_no_other(
    tmp_path, files, name, monkeypatch
):
    monkeypatch.setattr("orrery.elastic.snapshots.ANSWER_S", 0.3)
    header = read_header(snapshot(tmp_path / "a"))
    listener = socket.create_server(("127.0.0.1", 0))
    is_left = threading.Event()

    def answer() -> None:
        with listener, files.server().wrap_socket(listener.accept()[0], True) as tls:
            tls.recv(1000)
            tls.sendall(b"HTTP/1.1 200 OK\r\n" + BAD_ANSWERS[name])
            if name == "silence":
                is_left.wait(10)

    threading.Thread(target=answer, daemon=True).start()
    peer = PeerSource(f"127.0.0.1:{listener.getsockname()[1]}", files)
    sources = [peer, FolderSource(tmp_path / "a/round_000000003")]
    assert verify(assemble(header, tmp_path / "b", sources)) == header
    assert not is_left.is_set() and peer.num_bytes <= BLOCK
    is_left.set()
    peer.close()


def test_a_header_that_is_nested_too_deeply_is_skipped(tmp_path, files, serve):
    snapshot(tmp_path / "a")
    listener = socket.create_server(("127.0.0.1", 0))
    deep = b'{"facts":{"a":' + b"[" * 100_000

    def answer() -> None:
        with listener, files.server().wrap_socket(listener.accept()[0], True) as tls:
            tls.recv(1000)
            tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(deep) + deep)
            tls.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    peers = [f"127.0.0.1:{listener.getsockname()[1]}", serve(tmp_path / "a")]
    got = fetch_state(lambda: peers, lambda: (3, "digest 3"), tmp_path / "b", files, 0.0)
    assert verify(got).round == 3


class Broken(FolderSource):
    def read(self, block: Block) -> bytes:
        raise TypeError("no block")


def test_a_fetch_ends_when_a_source_has_a_defect(tmp_path):
    found, ends = snapshot(tmp_path / "a"), []

    def fetch() -> None:
        try:
            assemble(read_header(found), tmp_path / "b", [Broken(found), FolderSource(found)])
        except TypeError as error:
            ends.append(str(error))

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(20)
    assert ends == ["no block"]


def test_a_header_that_names_a_file_elsewhere_is_refused(tmp_path):
    found = snapshot(tmp_path)
    text = (found / HEADER).read_text().replace('"theta"', '"../theta"')
    (found / HEADER).write_text(text)
    with pytest.raises(ElasticError, match=r"part '../theta' .* is damaged; take the"):
        read_header(found)


def test_a_copy_that_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    usage = (100, 90, 10)
    monkeypatch.setattr(
        "orrery.elastic.snapshots.shutil.disk_usage",
        lambda _: type("Usage", (), {"free": usage[2]}),
    )
    with pytest.raises(ElasticError, match=r"^trainer.elastic.snapshots: 1 × .* lower trainer"):
        copy_state(tmp_path, 1, "d", state())
    assert list(tmp_path.iterdir()) == []


TRAINER = """
import os, sys
from pathlib import Path
import msgspec
from orrery.elastic.keeper import KeeperOptions, SnapshotKeeper
from orrery.elastic.snapshots import copy_state
options = msgspec.json.decode(sys.argv[1], type=KeeperOptions)
keeper = SnapshotKeeper(options)
print(keeper.process.pid, flush=True)
copy_state(Path(options.folder), 7, "digest 7", {"theta": b"t" * 9000}, block_bytes=1000)
keeper.copied()
os.kill(os.getpid(), 9)
"""


def test_a_killed_trainer_leaves_its_state_in_memory(tmp_path):
    options = KeeperOptions(str(tmp_path / "memory"), linger_s=0.0)
    text = msgspec.json.encode(options).decode()
    # The keeper inherits stderr, so the pipe ends when the last process does.
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, text], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert verify(published(tmp_path / "memory")[0]).round == 7


def until(holds) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def keeper_options(folder: Path, files: Certificates, port: int, linger_s: float) -> KeeperOptions:
    paths = str(files.authority), str(files.certificate), str(files.key)
    return KeeperOptions(str(folder), 2, "127.0.0.1", port, paths, linger_s)


def test_the_next_keeper_takes_over_port_and_folder_and_publishes_a_copy_left_behind(
    tmp_path, files
):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    options = keeper_options(tmp_path, files, port, 3600.0)
    with SnapshotKeeper(options) as first:
        copy_state(tmp_path, 1, "digest 1", {"theta": b"t"})
        first.copied()
        until(lambda: published(tmp_path))
        with SnapshotKeeper(msgspec.structs.replace(options, linger_s=0.0)) as second:
            assert first.process.wait(timeout=60) == 0
            copy_state(tmp_path, 2, "digest 2", {"theta": b"u"})
        assert second.process.wait(timeout=60) == 0
    assert [verify(each).round for each in published(tmp_path)] == [1, 2]


def test_a_taken_port_is_refused_at_the_start_and_later_does_not_stop_snapshots(tmp_path, files):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        options = keeper_options(tmp_path, files, sock.getsockname()[1], 0.0)
        with pytest.raises(ElasticError, match=rf"^--listen: port {options.port} of 127.0.0.1"):
            SnapshotKeeper(msgspec.structs.replace(options, bind_s=0.0))
    with SnapshotKeeper(options) as keeper:
        keeper.process.kill()
        keeper.process.wait()
        with socket.create_server(("127.0.0.1", options.port)):
            copy_state(tmp_path, 1, "digest 1", {"theta": b"t"})
            keeper.copied()
            until(lambda: published(tmp_path))
            assert keeper.process.poll() is None
        until(lambda: answers(options.port))  # the keeper tries again
    keeper.process.wait(timeout=60)


def answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_a_keeper_of_a_removed_folder_frees_its_port(tmp_path, files):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    options = keeper_options(tmp_path / "memory", files, port, 3600.0)
    with SnapshotKeeper(options) as first:
        shutil.rmtree(tmp_path / "memory")
        with SnapshotKeeper(msgspec.structs.replace(options, linger_s=0.0)) as second:
            assert first.process.wait(timeout=60) == 0
    assert second.process.wait(timeout=60) == 0


@pytest.mark.parametrize(("num_fetched", "most"), [(1, 4), (0, 2)])
def test_only_time_without_a_new_block_counts(tmp_path, monkeypatch, num_fetched, most):
    now_s, attempts = [0.0], []

    class Peer:
        def __init__(self, peer, certificates):
            self.name = peer

        def newest(self):
            return StateSnapshot(7, "digest", 1, {})

        def close(self):
            pass

    def cut(header, folder, sources):
        now_s[0] += 0.6
        attempts.append(1)
        if len(attempts) < 4:
            raise FetchFailed("cut", num_fetched)
        return folder

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=lambda _: None)
    for name, value in (("PeerSource", Peer), ("assemble", cut), ("time", clock)):
        monkeypatch.setattr(f"orrery.elastic.snapshots.{name}", value)
    with nullcontext() if num_fetched else pytest.raises(FetchFailed, match=r"round 7 .*cut"):
        fetch_state(lambda: ["a:1"], lambda: (7, "digest"), tmp_path, None, 1.0)
    assert len(attempts) == most
