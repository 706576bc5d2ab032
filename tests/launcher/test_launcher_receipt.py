"""Receipts: every stage's end is told, from whatever checkout, and no secret with it."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orrery.launcher import receipt
from orrery.launcher.receipt import Facts, ImageReader, code_state, record
from orrery.launcher.receipt import changes as changes_of
from orrery.manifest.diff import read_receipt

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-hunter2-hunter2"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    """A run's folder in a git checkout with one commit, without hooks and secrets of the user."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name in [name for name in os.environ if receipt.SECRET.search(name)]:
        monkeypatch.delenv(name)
    run_dir = tmp_path / "checkout" / "runs" / "reverse_text-0123456789ab"
    run_dir.mkdir(parents=True)
    (run_dir / "manifest.json").write_bytes((ROOT / "manifests/reverse_text.json").read_bytes())
    checkout = tmp_path / "checkout"
    (checkout / "code.py").write_text("x = 1\n")
    (checkout / ".gitignore").write_text("ignored\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "code.py", ".gitignore")
    git(checkout, "-c", "user.name=n", "-c", "user.email=n@example.com", "commit", "-qm", "one")
    return run_dir


def git(checkout: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(checkout), *words], check=True, capture_output=True, text=True
    ).stdout


def ended(
    run_dir: Path,
    stage: str = "init",
    attempt: int = 1,
    state: str = "done",
    message: str = "",
    **more,
) -> dict:
    """The receipt after `stage` has ended."""
    given = {"images": {}, "slurm_job_id": "77", "workspace_root": run_dir.parents[1], **more}
    record(run_dir, stage, attempt, state, message, 10.0, 20.0, ["node1"], **given)
    return read_receipt(run_dir / "receipt.json")


def image_facts(run_dir: Path, images: dict[str, Path]) -> dict[str, Facts]:
    """All that can be found out."""
    reader = ImageReader(run_dir, images)
    reader.wait()
    return reader.facts()


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_a_clean_checkout_is_told_by_its_commit(run_dir):
    told = ended(run_dir)["stages"]["init"]["attempts"][0]
    head = git(run_dir.parents[1], "rev-parse", "HEAD").strip()
    assert told["code"] == {
        "commit": head,
        "dirty": False,
        "diff_sha256": None,
        "diff": None,
        "note": "",
    }
    assert (told["nodes"], told["slurm_job_id"], told["started_s"], told["ended_s"]) == (
        ["node1"],
        "77",
        10.0,
        20.0,
    )
    assert told["versions"]["host"]["torch"] and told["versions"]["host"]["python"].startswith(
        "3.1"
    )
    assert not (run_dir / "receipts").exists()


def test_of_two_releases_on_the_path_the_one_that_is_imported_is_told(tmp_path):
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        write(
            tmp_path / folder / f"torch-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        )
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("first", "second"))
    told = subprocess.run(
        [sys.executable, "-c", receipt.VERSIONS],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        check=True,
    )
    assert json.loads(told.stdout)["torch"] == "2.0"


def test_the_kept_diff_of_a_dirty_checkout_makes_the_same_tree_again(run_dir, tmp_path):
    checkout = run_dir.parents[1]
    write(checkout / "code.py", "x = 2\n")
    write(checkout / "new/file with space.py", "y = 'ü'\n")
    (checkout / "picture").write_bytes(bytes(range(256)))
    write(checkout / "ignored", "not of the code\n")
    write(checkout / "large", "z" * (receipt.KEPT_BYTES + 1))
    index = git(checkout, "status", "--porcelain")
    told = ended(run_dir)["stages"]["init"]["attempts"][0]["code"]
    assert git(checkout, "status", "--porcelain") == index, "the index is as it was"
    diff = run_dir / told["diff"]
    assert told["dirty"] and hashlib.sha256(diff.read_bytes()).hexdigest() == told["diff_sha256"]
    assert (
        diff.name == f"dirty-{told['diff_sha256'][:12]}.diff"
        and told["note"] == "left out of the diff: large"
    )
    git(tmp_path, "clone", "-q", str(checkout), "again")
    git(tmp_path / "again", "apply", str(diff))
    for name in ("code.py", "new/file with space.py", "picture"):
        assert (tmp_path / "again" / name).read_bytes() == (checkout / name).read_bytes()
    assert not (tmp_path / "again" / "ignored").exists()
    assert ended(run_dir, "sft", 2)["stages"]["sft"]["attempts"][0]["code"] == told, (
        "the same dirt is kept once"
    )
    assert len(list((run_dir / "receipts").iterdir())) == 1


def test_untracked_files_may_have_names_that_are_not_utf_8(run_dir, monkeypatch):
    checkout = run_dir.parents[1]
    name = os.fsdecode(b"caf\xe9.txt")
    (checkout / name).write_bytes(b"x")
    told = code_state(run_dir, checkout)
    assert told.dirty and b"caf\\351.txt" in (run_dir / told.diff).read_bytes()
    monkeypatch.setattr(receipt, "KEPT_BYTES", 0)
    assert code_state(run_dir, checkout).note == "left out of the diff: caf\ufffd.txt"


def test_an_edit_of_the_same_length_in_the_second_of_the_commit_is_dirt(run_dir):
    checkout = run_dir.parents[1]
    git(checkout, "config", "core.trustctime", "false")  # no test can set that time
    os.utime(checkout / "code.py", (1e9, 1e9))
    git(checkout, "add", "code.py")
    write(checkout / "code.py", "x = 2\n")
    for path in ("code.py", ".git/index"):
        os.utime(checkout / path, (1e9, 1e9))
    assert code_state(run_dir, checkout).dirty


def test_code_is_told_as_it_was_when_the_stage_began(run_dir):
    before = code_state(run_dir, run_dir.parents[1])
    write(run_dir.parents[1] / "code.py", "x = 3\n")
    assert ended(run_dir, code=before)["stages"]["init"]["attempts"][0]["code"]["dirty"] is False


def test_without_a_checkout_or_without_git_it_says_so(run_dir, tmp_path, monkeypatch):
    assert code_state(run_dir, tmp_path).note.startswith("git: fatal: not a git repository")
    assert (
        code_state(run_dir, run_dir).note == "not a git checkout: neither commit nor diff is known"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    code = ended(run_dir)["stages"]["init"]["attempts"][0]["code"]
    assert (
        code["commit"] is None
        and code["dirty"] is None
        and "no git on this machine" in code["note"]
    )


def test_an_attempt_that_goes_on_with_other_code_or_images_says_which_and_which_it_was(run_dir):
    checkout, stages = run_dir.parents[1], ("init", "sft", "rl")
    first, clean = git(checkout, "rev-parse", "HEAD").strip(), code_state(run_dir, checkout)
    images = {"trainer": Path("/images/trainer-cuda-1.sif")}

    def changes(stage, images=images):
        return changes_of(run_dir, stages, stage, code_state(run_dir, checkout), images)

    assert changes("init") == ""
    ended(
        run_dir,
        "init",
        1,
        images={"trainer": {"file": "trainer-cuda-1.sif", "sha256": None, "versions": {}}},
    )
    assert changes("init") == changes("rl") == ""
    newer = {
        "trainer": Path("/images/trainer-cuda-2.sif"),
        "router": Path("/images/inference-cuda-1.sif"),
    }
    assert (
        changes("rl", newer)
        == "other images than attempt 1 (init): trainer trainer-cuda-1.sif → trainer-cuda-2.sif"
    )
    write(checkout / "code.py", "x = 2\n")
    dirty = code_state(run_dir, checkout).diff_sha256[:12]
    assert changes("rl") == f"other code than attempt 1 (init): diff none → {dirty}"
    ended(run_dir, "rl", 3, "failed")
    assert changes("rl") == "" != changes("sft"), "each stage by its own attempts first"
    write(checkout / "data.jsonl", "{}\n")
    added = code_state(run_dir, checkout).diff_sha256[:12]
    said = f"other uncommitted new files than attempt 3 (rl): diff {dirty} → {added}"
    assert changes("rl") == said
    write(checkout / "code.py", "x = 3\n")
    assert changes("rl").startswith(f"other code than attempt 3 (rl): diff {dirty} → ")
    write(checkout / "code.py", "x = 2\n")
    (checkout / "data.jsonl").unlink()
    git(checkout, "-c", "user.name=n", "-c", "user.email=n@example.com", "commit", "-qam", "two")
    second = git(checkout, "rev-parse", "HEAD").strip()
    expected = (
        f"other code than attempt 3 (rl): commit {first[:12]} → {second[:12]}, diff {dirty} → none"
    )
    assert changes("rl", {}) == expected
    assert changes_of(run_dir, stages, "rl", receipt.CodeState(None, None), {}) == "", (
        "what is not known is not called other"
    )
    ended(run_dir, "rl", 4, code=clean)
    write(run_dir / "receipt.json", "{")
    assert changes("rl") == ""


def test_restarts_count_attempts_that_died_without_a_word(run_dir):
    ended(run_dir, "init", 1)
    ended(run_dir, "rl", 2, "failed", "rl: trainer.0 was killed")
    told = ended(run_dir, "rl", 5)["stages"]["rl"]
    assert [(row["attempt"], row["state"]) for row in told["attempts"]] == [
        (2, "failed"), (3, "unrecorded"), (4, "unrecorded"), (5, "done"),
    ]  # fmt: skip
    assert told["restarts"] == 3


def test_what_comes_out_is_told_by_digest_and_only_of_a_stage_that_is_done(run_dir):
    write(run_dir / "weights/rl/model.safetensors", "weights")
    write(
        run_dir / "checkpoints/step_4.attempt_1/files.json", '{"trainer/rank_0.safetensors": "…"}'
    )
    write(run_dir / "checkpoints/step_4.attempt_1/trainer/rank_0.safetensors", "large")
    assert "outputs" not in ended(run_dir, "rl", 1, "failed")["stages"]["rl"]
    assert ended(run_dir, "rl", 2)["stages"]["rl"]["outputs"] == {
        "checkpoints/step_4.attempt_1/files.json": sha256('{"trainer/rank_0.safetensors": "…"}'),
        "weights/rl/model.safetensors": sha256("weights"),
    }


def test_very_large_weights_are_told_by_their_index(run_dir, monkeypatch):
    monkeypatch.setattr(receipt, "WHOLE_BYTES", 5)
    write(run_dir / "weights/rl/model-00001-of-00001.safetensors", "weights")
    write(run_dir / "weights/rl/model.safetensors.index.json", "{}")
    assert ended(run_dir, "rl")["stages"]["rl"]["outputs"] == {
        "weights/rl/model-00001-of-00001.safetensors": "not hashed, 7 bytes",
        "weights/rl/model.safetensors.index.json": sha256("{}"),
    }


def test_the_table_of_metrics_holds_what_counts(run_dir):
    stamp = {"stage": "rl", "time_s": 1.0}
    rows = [
        {
            **stamp,
            "attempt": 1,
            "step": 1,
            "loss": 3.0,
            "num_samples": 2,
            "num_tokens": 10,
            "num_trained_tokens": 4,
        },
        {
            **stamp,
            "attempt": 1,
            "step": 2,
            "loss": 9.0,
            "num_samples": 2,
            "num_tokens": 99,
            "num_trained_tokens": 99,
        },
        {
            **stamp,
            "attempt": 2,
            "step": 2,
            "loss": 1.0,
            "num_samples": 2,
            "num_tokens": 11,
            "num_trained_tokens": 5,
        },
        {**stamp, "attempt": 2, "step": None, "event": "compare", "num_trained_tokens": 3},
    ]
    write(run_dir / "metrics/trainer.0.jsonl", "\n".join(map(json.dumps, rows)) + "\n")
    batches = [
        {**stamp, "attempt": 2, "step": step, "event": "batch", "reward_mean": step / 10}
        for step in (1, 2)
    ]
    write(run_dir / "metrics/orchestrator.0.jsonl", "\n".join(map(json.dumps, batches)) + "\n")
    write(
        run_dir / "stages/evaluate/result.json",
        json.dumps({"tasks": {}, "before": {"reward_mean": 0.4}, "after": {"reward_mean": 0.6}}),
    )
    assert ended(run_dir, "rl")["stages"]["rl"]["metrics"] == {
        "steps": 2, "loss": 1.0, "num_samples": 4, "num_tokens": 21, "num_trained_tokens": 9,
        "reward_last_batch": 0.2,
    }  # fmt: skip
    assert ended(run_dir, "evaluate", 2)["stages"]["evaluate"]["metrics"] == {
        "reward_before": 0.4,
        "reward_after": 0.6,
    }


def test_where_held_out_rollouts_failed_the_receipt_says_how_many(run_dir):
    def metrics(*failed: int) -> dict:
        policies = zip(("before", "after"), failed, strict=True)
        result = {
            when: {"reward_mean": 0.5, "num_rollouts": 256 - num, "num_failed": num}
            for when, num in policies
        }
        write(run_dir / "stages/evaluate/result.json", json.dumps({"tasks": {}, **result}))
        return ended(run_dir, "evaluate")["stages"]["evaluate"]["metrics"]

    assert metrics(0, 0) == {"reward_before": 0.5, "reward_after": 0.5}
    counts = {
        "num_rollouts_before": 256,
        "num_failed_before": 0,
        "num_rollouts_after": 20,
        "num_failed_after": 236,
    }
    write(
        run_dir / "stages/evaluate/result.json",
        json.dumps(
            {
                "before": {"reward_mean": 0.5, "num_timeouts": 0},
                "after": {"reward_mean": 0.5, "num_timeouts": 9},
            }
        ),
    )
    timed_out = ended(run_dir, "evaluate")["stages"]["evaluate"]["metrics"]
    assert timed_out == {
        "reward_before": 0.5,
        "reward_after": 0.5,
        "num_timeouts_before": 0,
        "num_timeouts_after": 9,
    }
    assert metrics(0, 236) == {"reward_before": 0.5, "reward_after": 0.5, **counts}


def test_an_image_is_hashed_and_asked_once(run_dir, tmp_path, monkeypatch):
    image = write(tmp_path / "trainer-cpu-0123456789abcdef.sif", "image")
    apptainer = write(
        tmp_path / "bin/apptainer",
        '#!/bin/sh\necho asked >> "$(dirname "$0")/asked"\necho \'{"torch": "2.0"}\'\n',
    )
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{os.environ['PATH']}")
    for attempt, stage in enumerate(("init", "sft"), 1):
        told = ended(run_dir, stage, attempt, images=image_facts(run_dir, {"trainer": image}))[
            "stages"
        ][stage]["attempts"][0]
        assert told["images"] == {
            "trainer": {"file": image.name, "sha256": sha256("image"), "versions": {"torch": "2.0"}}
        }
        assert "host" not in told["versions"], "what the host has is not what the roles had"
    assert (apptainer.parent / "asked").read_text() == "asked\n"
    image.unlink()
    told = ended(run_dir, "rl", 3, images=image_facts(run_dir, {"trainer": tmp_path / "gone.sif"}))[
        "stages"
    ]["rl"]["attempts"][0]
    assert told["images"]["trainer"]["sha256"] is None


def test_images_are_read_while_the_stage_runs_and_its_end_waits_for_none(
    run_dir, tmp_path, monkeypatch
):
    image, slow = write(tmp_path / "trainer.sif", "image"), tmp_path / "slow.sif"
    os.mkfifo(slow)
    apptainer = write(tmp_path / "bin/apptainer", '#!/bin/sh\necho \'{"torch": "2.0"}\'\n')
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{os.environ['PATH']}")
    read = {"file": image.name, "sha256": sha256("image"), "versions": {"torch": "2.0"}}
    assert image_facts(run_dir, {"trainer": image, "report": image}) == {
        "report": read,
        "trainer": read,
    }
    reader = ImageReader(run_dir, {"inference": slow})
    began_s = time.monotonic()
    facts = reader.facts()
    told = ended(run_dir, "rl", images={"trainer": read, **facts})["stages"]["rl"]["attempts"][0]
    assert time.monotonic() - began_s < 20
    assert told["images"]["inference"] == {
        "file": "slow.sif", "sha256": None,
        "versions": {"unknown": "the stage ended before its images were read"},
    }  # fmt: skip
    assert told["images"]["trainer"] == read and "host" not in told["versions"]
    slow.write_text("late")
    reader.wait()
    assert reader.facts()["inference"]["sha256"] == sha256("late")


def test_an_image_is_asked_without_what_the_user_has_set_for_apptainer(
    run_dir, tmp_path, monkeypatch
):
    image = write(tmp_path / "trainer.sif", "image")
    apptainer = write(
        tmp_path / "bin/apptainer",
        '#!/bin/sh\necho "{\\"bind\\": \\"$APPTAINER_BIND$SINGULARITY_BIND\\", '
        '\\"argv\\": \\"$1 $2 $3\\"}"\n',
    )
    apptainer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("APPTAINER_BIND", "/nowhere")
    monkeypatch.setenv("SINGULARITY_BIND", "/nowhere")
    assert image_facts(run_dir, {"trainer": image})["trainer"]["versions"] == {
        "bind": "",
        "argv": "-s exec --cleanenv",
    }


def test_no_secret_enters_a_receipt_or_a_kept_diff(run_dir, monkeypatch):
    for name in (
        "ORRERY_TOKEN",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "GOOGLE_CREDENTIALS",
    ):
        monkeypatch.setenv(name, f"{name}-{SECRET}")
    monkeypatch.setenv("QUOTED_TOKEN", f'"{SECRET}"\\')
    checkout = run_dir.parents[1]
    write(checkout / "code.py", f"key = 'WANDB_API_KEY-{SECRET}'\n")
    for name in (".env", "conf/deploy.pem", "my_credentials.json", "id_ed25519"):
        write(checkout / name, SECRET)
    message = (
        f'rl: trainer.0: Bearer HF_TOKEN-{SECRET} "{SECRET}"\\ attempt-{SECRET}; its log is '
        f"{run_dir}/logs/trainer.0.log"
    )
    told = ended(run_dir, "rl", 1, "failed", message, secrets=[f"attempt-{SECRET}"])["stages"][
        "rl"
    ]["attempts"][0]
    kept = [
        path
        for path in [run_dir / "receipt.json", *(run_dir / "receipts").iterdir()]
        if path.is_file()
    ]
    assert len(kept) == 2
    for path in kept:
        text = path.read_text()
        assert SECRET not in text
        assert not any(
            name in text for name in ("ORRERY_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD")
        ), "no environment is kept"
    assert (
        told["message"].endswith(f"its log is {run_dir.name}/logs/trainer.0.log")
        and "<struck out>" in told["message"]
    )
    assert told["code"]["note"].startswith(
        "left out of the diff: .env, conf/deploy.pem, id_ed25519, my_credentials.json"
    )
    assert "a secret was struck out" in told["code"]["note"]


@pytest.mark.parametrize(
    ("names", "is_secret"),
    [
        (
            [
                "trainer/token_weighting.py",
                "tokenize.sh",
                "tokens.libsonnet",
                "secret_word.py",
                "docs/tokens.md",
                "secrets/code.py",
            ],
            False,
        ),
        (
            [
                ".npmrc",
                "home/.pypirc",
                "kubeconfig",
                "conf/kubeconfig.yaml",
                "hf_token",
                "token.json",
                "Tokens.txt",
            ],
            True,
        ),
        (["secrets.sh", "conf/my_credentials.py", "credential.md"], True),
    ],
)
def test_files_that_are_called_like_secrets_are_no_code(names, is_secret):
    assert {name for name in names if bool(receipt.SECRET_FILE.search(name)) != is_secret} == set()


def test_a_run_whose_manifest_is_gone_has_a_receipt_that_says_so(run_dir):
    (run_dir / "manifest.json").unlink()
    told = ended(run_dir)
    assert told["run"]["name"] == run_dir.name and told["run"]["id"].startswith(
        "unknown: reverse_text-0123456789ab/manifest.json"
    )
    assert ended(run_dir, "sft", 2)["stages"].keys() == {"init", "sft"}


def test_a_damaged_receipt_is_put_aside(run_dir):
    write(run_dir / "receipt.json", '{"schema": 1')
    assert ended(run_dir)["stages"].keys() == {"init"}
    assert (run_dir / "receipt.unreadable.json").read_text() == '{"schema": 1'
