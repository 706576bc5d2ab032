"""Usage of a process and its children, and the cost of measuring it."""

import errno
import itertools
import os
import subprocess
import sys
import time

from orrery.runtime.metrics import (
    PERIOD_S,
    TICKS_PER_S,
    MetricsFile,
    Sampler,
    UsageRows,
    parse_stat,
    process_tree,
    rows,
)
from orrery.runtime.timing import Pace


def test_a_name_with_brackets_and_blanks_does_not_shift_the_fields():
    before = "S 1 " + " ".join(["0"] * 9)
    stat = parse_stat(
        f"42 (a) b) {before} {3 * TICKS_PER_S} {TICKS_PER_S} " + " ".join(["0"] * 8) + " 7 0 0\n"
    )
    assert stat.cpu_s == 4.0 and stat.rss_bytes == 7 * os.sysconf("SC_PAGE_SIZE")


def test_children_count_for_the_process_that_started_them():
    code = """
import time
held = bytearray(200 << 20)
print(flush=True)
end = time.process_time() + 0.3
while time.process_time() < end:
    pass
print(flush=True)
input()
"""
    sampler = Sampler(os.getpid())
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        held = sampler.sample()["rss_bytes"]
        began = time.monotonic()
        child.stdout.readline()
        used = sampler.sample()
        assert child.pid in process_tree(os.getpid())
        assert held > 200 << 20 and used["cpu_percent"] * (time.monotonic() - began) / 100 > 0.2
    finally:
        child.communicate(b"\n")
    assert sampler.sample()["rss_bytes"] < held - (150 << 20)


def test_a_child_that_counts_for_itself_is_left_out_with_all_that_it_started():
    code = """
import subprocess, sys
below = "held = bytearray(200 << 20); print(flush=True); input()"
held = bytearray(200 << 20)
subprocess.run([sys.executable, "-c", below])
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        together, apart = (
            Sampler(os.getpid()).sample(),
            Sampler(os.getpid(), without=[child.pid]).sample(),
        )
        assert Sampler(child.pid).sample()["rss_bytes"] > 400 << 20
        assert together["rss_bytes"] - apart["rss_bytes"] > 350 << 20
    finally:
        child.communicate(b"\n")


def test_rows_come_at_their_period_until_the_role_ends(tmp_path):
    metrics = MetricsFile(tmp_path, "rl", "trainer", 1, 3)
    usage, path = (
        UsageRows("trainer.1", metrics, period_s=0.05),
        tmp_path / "metrics" / "trainer.1.jsonl",
    )
    begin_s = time.monotonic()
    usage.start()
    while len(found := list(rows(path))) < 3:
        time.sleep(0.005)
    assert 0.05 * len(found) <= time.monotonic() - begin_s < PERIOD_S * len(found)
    usage.stop()
    found = list(rows(path))
    time.sleep(0.2)
    assert list(rows(path)) == found
    assert {(row["event"], row["stage"], row["attempt"], row["step"]) for row in found} == {
        ("usage", "rl", 3, None)
    }
    assert all(
        row["processes"]["trainer.1"].keys() == {"cpu_percent", "rss_bytes"} for row in found
    )
    metrics.close()


def test_a_row_that_cannot_be_written_is_said_once_and_the_next_ones_come(
    tmp_path, monkeypatch, caplog
):
    metrics, errors = MetricsFile(tmp_path, "rl", "trainer", 1, 3), [errno.EIO, errno.ESTALE]
    write = metrics.write

    def write_or_fail(**values):
        if errors:
            raise OSError(errors[-1], os.strerror(errors.pop()))
        write(**values)

    monkeypatch.setattr(metrics, "write", write_or_fail)
    usage = UsageRows("trainer.1", metrics, period_s=0.01)
    usage.start()
    end_s = time.monotonic() + 20
    while (
        len(found := list(rows(tmp_path / "metrics" / "trainer.1.jsonl"))) < 3
        and time.monotonic() < end_s
    ):
        time.sleep(0.005)
    usage.stop()
    assert len(found) >= 3 and len({row["time_s"] for row in found}) == len(found)
    assert [record.message for record in caplog.records] == [
        f"CPU and memory use cannot be written ({os.strerror(errno.ESTALE)}); trying again"
    ]
    metrics.close()


def test_rows_of_a_long_run_come_once_a_minute_and_of_a_short_one_at_every_look():
    pace, now_s, due = Pace(0.5, 0.0), 0.0, []
    while now_s < 100_000:
        if pace.due(now_s):
            due.append(now_s)
        now_s += 0.5 if now_s < 1000 else 10.0
    early, late = [at for at in due if at <= 400], [at for at in due if at >= 80_000]
    assert early == [0.5 * i for i in range(801)]
    assert {later - at for at, later in itertools.pairwise(late)} == {60.0}
    assert sum(60.0 <= at < 61.0 for at in due) == 2


def test_looks_that_come_a_little_early_are_not_left_out():
    pace = Pace(0.5, 10.0)
    assert all(pace.due(10.0 + 0.499 * look) for look in range(100))


def test_who_asks_more_often_gets_no_more_rows():
    pace = Pace(2.0, 0.0)
    assert sum(pace.due(0.1 * look) for look in range(1000)) in (50, 51)


def test_a_look_costs_less_than_half_a_percent_of_a_core():
    children = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(4)
    ]
    try:
        sampler, begin_s = Sampler(os.getpid()), time.process_time()
        for _ in range(20):
            sampler.sample()
        assert (time.process_time() - begin_s) / 20 < 0.005 * PERIOD_S
    finally:
        for child in children:
            child.communicate(b"\n")
