"""Fences: requests, and their fulfilment."""

import pytest

from orrery.runtime import process_control


def test_what_is_forgotten_is_not_read_again(tmp_path):
    for incarnation in range(3):
        process_control.fence(
            tmp_path, "rl", 1, "inference.0", incarnation, f"engine 0 is gone, {incarnation}"
        )
    first, *others = process_control.fenced(tmp_path, "rl", 1)
    assert first == process_control.Fenced("inference.0", 0, "engine 0 is gone, 0")
    process_control.forget_fence(tmp_path, "rl", 1, first)
    process_control.forget_fence(tmp_path, "rl", 1, first)  # by a launcher that looked twice
    assert process_control.fenced(tmp_path, "rl", 1) == others


@pytest.mark.parametrize("name", ["inference.0.2.0", ".inference.0.1.0.tmp", "inference.0.1.x"])
def test_what_another_attempt_asked_and_what_is_being_written_is_passed_over_unread(tmp_path, name):
    (process_control.fence_dir(tmp_path, "rl") / name).mkdir(parents=True)  # to read it would raise
    assert process_control.fenced(tmp_path, "rl", 1) == []
