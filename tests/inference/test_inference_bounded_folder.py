"""A folder whose files take at most so many bytes."""

import os
import threading

import pytest

from orrery.inference.kv_connectors import BoundedFolder

PAGE = 4096


def write(files, *paths, num_bytes=PAGE):
    with files.writing([str(path) for path in paths], num_bytes):
        for path in paths:
            if not path.exists():
                path.write_bytes(bytes(num_bytes))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_used_longest_ago_makes_room_before_a_file_is_written(tmp_path):
    files = BoundedFolder(tmp_path, 3 * PAGE)
    for name in "abc":
        write(files, tmp_path / name)
    files.used([str(tmp_path / "a"), str(tmp_path / "nobody's")])
    write(files, tmp_path / "b")  # again: it is there
    with files.writing([str(tmp_path / "d")], 1):
        assert names(tmp_path) == ["a", "b"]
        (tmp_path / "d").write_bytes(b"d")
    write(files, tmp_path / "e", tmp_path / "f")
    assert names(tmp_path) == ["d", "e", "f"]


def test_a_file_counts_in_whole_pages(tmp_path):
    files = BoundedFolder(tmp_path, 4 * PAGE)
    for name in "abc":
        write(files, tmp_path / name, num_bytes=PAGE + 1)
    assert names(tmp_path) == ["b", "c"]


def test_files_of_an_earlier_process_are_found_and_the_oldest_beyond_the_bound_go(
    tmp_path,
):
    for age, name in enumerate("cabd"):
        path = tmp_path / f"{name}{name}" / name
        path.parent.mkdir()
        path.write_bytes(bytes(PAGE))
        os.utime(path, ns=(10**18, 10**18 - age))
    files = BoundedFolder(tmp_path, 3 * PAGE)
    assert sorted(path.name for path in tmp_path.rglob("?")) == ["a", "b", "c"]
    write(files, tmp_path / "e")
    assert sorted(path.name for path in tmp_path.rglob("?")) == ["a", "c", "e"]


def test_a_write_that_fails_leaves_no_trace_in_the_account(tmp_path):
    files = BoundedFolder(tmp_path, 3 * PAGE)
    write(files, tmp_path / "a")
    with (
        pytest.raises(OSError, match="no space"),
        files.writing([str(tmp_path / name) for name in "bc"], PAGE),
    ):
        (tmp_path / "b").write_bytes(bytes(PAGE))
        raise OSError("no space")
    write(files, tmp_path / "d")
    assert names(tmp_path) == ["a", "b", "d"]
    write(files, tmp_path / "e")
    assert names(tmp_path) == ["b", "d", "e"]


def test_a_file_that_has_lost_its_room_while_it_was_written_goes(tmp_path):
    files = BoundedFolder(tmp_path, PAGE)
    with files.writing([str(tmp_path / "a")], PAGE):
        write(files, tmp_path / "b")
        (tmp_path / "a").write_bytes(bytes(PAGE))
    assert names(tmp_path) == ["b"]


def test_many_writers_hold_the_bound_together(tmp_path):
    files, most = BoundedFolder(tmp_path, 64 * PAGE), []

    def fill(writer):
        for number in range(200):
            with files.writing([str(tmp_path / f"{writer}.{number}")], PAGE):
                (tmp_path / f"{writer}.{number}").write_bytes(bytes(PAGE))
            if number % 10 == 0:
                most.append(len(os.listdir(tmp_path)))

    writers = [threading.Thread(target=fill, args=(writer,)) for writer in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    # A listing is not of one moment: every writer may have replaced a file meanwhile.
    assert max(most) <= 64 + 8
    assert len(names(tmp_path)) == 64 and names(tmp_path)[-1].endswith(".199")
