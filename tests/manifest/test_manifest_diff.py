"""Diff and show of what has run: receipts."""

import json

import manifest_specs
import pytest

from orrery.manifest.cli import app, run_app
from orrery.manifest.diff import diff_receipts, read_receipt
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json, run_dir
from orrery.manifest.render import render

ATTEMPT = {
    "attempt": 1, "state": "done", "message": "done", "started_s": 1.0, "ended_s": 2.0, 
    "nodes": ["node1", "node2"], "slurm_job_id": "7",
    "code": {"commit": "c1", "dirty": False}, "images": {"trainer": {"sha256": "aa"}},
    "versions": {"driver": None},
}  # fmt: skip


def receipt(**changes):
    stages = {
        "sft": {
            "attempts": [dict(ATTEMPT)],
            "restarts": 0,
            "outputs": {"weights/sft/model.safetensors": "11"},
            "metrics": {"loss": 0.5},
        },
        "rl": {
            "attempts": [{**ATTEMPT, "attempt": 2}],
            "restarts": 0,
            "outputs": {},
            "metrics": {"reward_last_batch": 0.4},
        },
    }
    return json.loads(
        json.dumps(
            {"schema": 1, "run": {"name": "words", "id": "0" * 64}, "stages": stages, **changes}
        )
    )


def lines(before, after, **options):
    return [str(one) for one in diff_receipts(before, after, **options)]


def test_what_changed_alike_in_every_stage_is_one_line_and_the_rest_names_its_stage():
    other = receipt()
    for stage in other["stages"].values():
        stage["attempts"][-1]["code"]["commit"] = "c2"
    other["stages"]["rl"]["attempts"][-1]["images"]["trainer"]["sha256"] = "bb"
    other["stages"]["rl"]["attempts"][-1]["nodes"] = ["node1", "node3"]
    other["stages"]["rl"]["metrics"]["reward_last_batch"] = 0.6
    assert lines(receipt(), other) == [
        'receipt.images.rl.trainer.sha256: "aa" → "bb"',
        'receipt.code.commit: "c1" → "c2"',
        'receipt.nodes.rl[1]: "node2" → "node3"',
        "receipt.metrics.rl.reward_last_batch: 0.4 → 0.6",
    ]


def test_times_and_job_ids_are_told_only_when_everything_is_asked_for():
    other = receipt()
    other["stages"]["rl"]["attempts"][-1] |= {
        "started_s": 5.0,
        "slurm_job_id": "8",
        "message": "rl: done in 4 s",
        "attempt": 3,
    }
    other["stages"]["rl"]["attempts"].insert(0, {"attempt": 2, "state": "unrecorded"})
    other["stages"]["rl"]["restarts"] = 1
    assert lines(receipt(), other) == ["receipt.restarts.rl: 0 → 1"]
    told = lines(receipt(), other, everything=True)
    assert (
        'receipt.slurm_job_id.rl: "7" → "8"' in told
        and 'receipt.attempts_before.rl[0].state: absent → "unrecorded"' in told
    )


def test_a_stage_that_only_one_run_has_is_absent_in_the_other():
    other = receipt()
    del other["stages"]["sft"]
    assert "receipt.metrics.sft.loss: 0.5 → absent" in lines(receipt(), other)
    assert lines(other, other) == []


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"schema": 1}', '{"schema": 1, "run": {"id": "0"}, "stages": []}'),
        '{"schema": 1, "run": {"id": 0}, "stages": {}}',
    ],
)
def test_what_is_not_a_receipt_is_one_sentence(tmp_path, text):
    (tmp_path / "receipt.json").write_text(text)
    with pytest.raises(OrreryError, match=r"receipt\.json: (not a receipt|not JSON|holds a list)"):
        read_receipt(tmp_path / "receipt.json")


def test_a_receipt_of_another_format_is_refused(tmp_path):
    (tmp_path / "receipt.json").write_text(json.dumps(receipt(schema=2)))
    with pytest.raises(OrreryError, match="format is 2, and this Orrery reads 1"):
        read_receipt(tmp_path / "receipt.json")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Two ended runs. `words_seed_2` has the better reward."""
    workspace = manifest_specs.checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, reward in (("words_seed_1", 0.4), ("words_seed_2", 0.6)):
        manifest = render(workspace, name).manifest
        folder = run_dir(tmp_path / "runs", manifest)
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(pretty_json(manifest))
        ran = receipt()
        ran["stages"]["rl"]["metrics"]["reward_last_batch"] = reward
        (folder / "receipt.json").write_text(json.dumps(ran))
    return tmp_path


def said(capsys, *words):
    code = run_app(lambda: app(list(words), standalone_mode=False))
    return code, *capsys.readouterr()


REWARD = "receipt.metrics.rl.reward_last_batch: 0.4 → 0.6"


@pytest.mark.parametrize("spell", [
    lambda folder: folder.name.partition("-")[0], lambda folder: folder.name, str,
    lambda folder: str(folder / "receipt.json"),
], ids=["name", "folder's name", "folder", "receipt"])  # fmt: skip
def test_runs_may_be_named_in_every_way_and_the_manifests_come_first(checkout, capsys, spell):
    one, two = (spell(next(checkout.glob(f"runs/words_seed_{seed}-*"))) for seed in (1, 2))
    code, out, _ = said(capsys, "diff", one, two)
    assert code == 0 and "seed: 1 → 2" in out.splitlines() and out.splitlines()[-1] == REWARD
    assert said(capsys, "diff", one, one) == (0, "", "")


def test_a_manifest_is_compared_as_a_manifest(checkout, capsys):
    one, two = (
        str(next(checkout.glob(f"runs/words_seed_{seed}-*")) / "manifest.json") for seed in (1, 2)
    )
    _, out, _ = said(capsys, "diff", one, two)
    assert "seed: 1 → 2" in out.splitlines() and "receipt" not in out
    _, out, _ = said(capsys, "diff", "words", next(checkout.glob("runs/words_seed_1-*")).name)
    assert "name:" in out and "receipt" not in out, "words has not run"


def test_a_copy_of_a_receipt_alone_is_compared_with_a_receipt_and_with_nothing_else(
    checkout, capsys
):
    copied = checkout / "theirs.json"
    copied.write_bytes((next(checkout.glob("runs/words_seed_1-*")) / "receipt.json").read_bytes())
    assert said(capsys, "diff", "theirs.json", "words_seed_2") == (0, REWARD + "\n", "")
    code, out, err = said(capsys, "diff", "words", "theirs.json")
    assert (
        code == 2
        and out == ""
        and "theirs.json: a receipt without a manifest.json beside it" in err
    )


def test_show_prints_a_receipt_or_a_field_of_it(checkout, capsys):
    assert said(
        capsys, "show", "words_seed_2", "stages.rl.metrics.reward_last_batch", "--receipt"
    ) == (0, "0.6\n", "")
    assert json.loads(said(capsys, "show", "--receipt", "words_seed_1")[1]) == receipt()
    code, _, err = said(capsys, "show", "--receipt", "words")
    assert code == 2 and "words: has no receipt yet" in err
    assert (
        "did you mean 'stages.rl'?"
        in said(capsys, "show", "words_seed_2", "stages.rll", "--receipt")[2]
    )
