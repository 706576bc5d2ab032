"""Fence: what is asked, and what has been done."""

import pytest

from orrery.observe import fence


def test_what_is_forgotten_is_not_read_again(tmp_path):
    for incarnation in range(3):
        fence.ask(tmp_path, "rl", 1, "inference.0", incarnation, f"engine 0 is gone, {incarnation}")
    first, *others = fence.asked(tmp_path, "rl", 1)
    assert first == fence.Fenced("inference.0", 0, "engine 0 is gone, 0")
    fence.forget(tmp_path, "rl", 1, first)
    fence.forget(tmp_path, "rl", 1, first)  # by a launcher that looked twice
    assert fence.asked(tmp_path, "rl", 1) == others


@pytest.mark.parametrize("name", ["inference.0.2.0", ".inference.0.1.0.tmp", "inference.0.1.x"])
def test_what_another_attempt_asked_and_what_is_being_written_is_passed_over_unread(tmp_path, name):
    (fence.fence_dir(tmp_path, "rl") / name).mkdir(parents=True)  # to read it would raise
    assert fence.asked(tmp_path, "rl", 1) == []
