"""A run's folder: its layout, the numbers of its attempts, the order of its checkpoints."""

import threading

import pytest

from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import (  # fmt: skip
    LAYOUT,
    Checkpoint,
    begin,
    begin_attempt,
    check_layout,
    checkpoint_named,
    checkpoints_dir,
    has_layout,
    last_attempt,
    whole_checkpoints,
)


def test_a_new_folder_has_the_layout_and_an_old_one_does_not_get_it(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    begin(new)
    check_layout(new)
    old.mkdir()
    (old / "manifest.json").write_text("{}")
    begin(old)
    assert not has_layout(old)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            None,
            "an older release of Orrery began this run (layout 1, and this release reads only "
            f"layout {LAYOUT})",
        ),
        (str(LAYOUT + 1), "a newer release of Orrery began this run"),
        ("", "not a number"),
        ("two", "not a number"),
    ],
)
def test_another_layout_is_refused_with_what_to_type(tmp_path, content, sentence):
    folder = tmp_path / "run"
    folder.mkdir()
    if content is not None:
        (folder / "layout").write_text(content)
    with pytest.raises(OrreryError) as refused:
        check_layout(folder)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert f"type `mv {folder} {tmp_path / '.run'}` and start the run again to begin anew" in str(
        refused.value
    )


def test_an_attempts_number_is_given_once_though_many_ask_at_once(tmp_path):
    given, barrier = [], threading.Barrier(8)

    def ask():
        barrier.wait()
        given.append(begin_attempt(tmp_path))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(given) == list(range(1, 9)) and last_attempt(tmp_path) == 8


def test_checkpoints_are_ordered_by_step_then_by_attempt_and_other_names_are_passed_over(tmp_path):
    names = (
        "step_9.attempt_2",
        "step_10.attempt_1",
        "step_10.attempt_2",
        "step_10.attempt_10",
        "step_11",
        "step_12.attempt_1_good",
    )
    for name in (*names, "step_13.attempt_1"):
        (folder := checkpoints_dir(tmp_path) / name).mkdir(parents=True)
        if name in names:
            (folder / "COMPLETE").touch()
    found = whole_checkpoints(tmp_path)
    assert [one.name for one in found] == [
        "step_9.attempt_2",
        "step_10.attempt_1",
        "step_10.attempt_2",
        "step_10.attempt_10",
    ]
    assert [checkpoint_named(one.name) for one in found] == found and checkpoint_named(
        "step_11"
    ) is None
    assert found[-1] == Checkpoint(step=10, attempt=10) and whole_checkpoints(tmp_path, "sft") == []
