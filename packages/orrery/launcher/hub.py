"""Download files of a Hugging Face repository at one commit, and verify their digests.

`huggingface_hub` itself checks only sizes.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import httpx2
import huggingface_hub as hub
from huggingface_hub import constants, errors

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import publish_folder, sha256
from orrery.manifest.shards import SUMS, read_sums, sums_text

constants.HF_HUB_DISABLE_XET |= "HF_HUB_DISABLE_XET" not in os.environ

T = TypeVar("T")
WAITS_S = (1.0, 2.0, 4.0)
LINKED_BYTES = 1 << 20  # smaller files are copied, not linked, because users may edit them
Kind = Literal["model", "dataset"]


@dataclass(frozen=True)
class HubFile:
    """A file's size and digest: sha256 (64 hex digits) or git's sha1 (40)."""

    num_bytes: int
    digest: str


@dataclass(frozen=True)
class HubRepository:
    kind: Kind
    repository: str
    revision: hub.ResolvedRevision
    files: dict[str, HubFile]

    @property
    def name(self) -> str:
        return self.repository.rpartition("/")[2]

    @property
    def title(self) -> str:
        return f"{self.kind} {self.repository} at {self.revision.resolved}"


def find(kind: Kind, word: str, patterns: Sequence[str]) -> HubRepository:
    """Resolve OWNER/NAME[@REVISION] to a commit and list its files.

    With `HF_HUB_OFFLINE`, the hub's cache must have the files that match `patterns`.
    """
    repository, _, asked = word.partition("@")
    if repository.count("/") != 1 or (asked == "" and "@" in word):
        raise OrreryError(
            f"{word!r}: is no repository. Write OWNER/NAME[@REVISION], such as Qwen/Qwen3-0.6B"
        )
    with _explained(kind, repository, asked):
        revision = _patient(
            lambda: hub.resolve_revision(repository, repo_type=kind, revision=asked or None)
        )
        if constants.is_offline_mode():
            folder = hub.snapshot_download(
                repository, repo_type=kind, revision=revision, allow_patterns=list(patterns)
            )
            return HubRepository(kind, repository, revision, _cached(Path(folder)))
        listed = _patient(
            lambda: list(
                hub.HfApi().list_repo_tree(
                    repository, recursive=True, revision=revision.resolved, repo_type=kind
                )
            )
        )
    files = {
        one.path: HubFile(one.size, one.lfs.sha256 if one.lfs else one.blob_id)
        for one in listed
        if isinstance(one, hub.hf_api.RepoFile)
    }
    return HubRepository(kind, repository, revision, files)


def _cached(folder: Path) -> dict[str, HubFile]:
    # A snapshot's files are links to files named by digest.
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): HubFile(path.stat().st_size, path.resolve().name)
        for path in paths
    }


def download(source: HubRepository, names: Iterable[str], folder: Path) -> dict[str, Path]:
    """Download `names` into `folder` and verify them. Return paths by name.

    Large files become hard links if the hub's cache is on the same disk.
    """
    names = sorted(names)
    _check_disk(source, names, folder)
    with _explained(source.kind, source.repository, source.revision):
        snapshot = Path(
            _patient(
                lambda: hub.snapshot_download(
                    source.repository,
                    repo_type=source.kind,
                    revision=source.revision,
                    allow_patterns=names,
                )
            )
        )
    placed = {}
    for name in names:
        _verify(source, name, snapshot / name)
        placed[name] = folder / name
        placed[name].parent.mkdir(parents=True, exist_ok=True)
        _place((snapshot / name).resolve(), placed[name])
    return placed


def _place(file: Path, target: Path) -> None:
    if file.stat().st_size >= LINKED_BYTES:
        try:
            os.link(file, target)
            return
        except OSError:  # the cache is on another disk
            pass
    shutil.copyfile(file, target)


def _verify(source: HubRepository, name: str, path: Path) -> None:
    expected = source.files[name].digest
    if len(expected) == 64:
        found = sha256(path)
    else:
        content = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    if found == expected:
        return
    path.resolve().unlink()
    path.unlink(missing_ok=True)
    raise OrreryError(
        f"{source.repository}: {name} has the digest {found}, and the hub lists {expected}. "
        f"The file was deleted. Try again, or set HF_ENDPOINT to another hub than "
        f"{constants.ENDPOINT}"
    )


def _check_disk(source: HubRepository, names: list[str], folder: Path) -> None:
    def is_cached(name: str) -> bool:
        known = hub.try_to_load_from_cache(
            source.repository, name, revision=source.revision.resolved, repo_type=source.kind
        )
        return isinstance(known, str)

    cache = Path(constants.HF_HUB_CACHE).expanduser()
    while not cache.exists():
        cache = cache.parent
    num_bytes = sum(source.files[name].num_bytes for name in names)
    missing = sum(source.files[name].num_bytes for name in names if not is_cached(name))
    needs = [(cache, missing, "set HF_HOME to a folder on a larger disk")]
    if os.stat(cache).st_dev != os.stat(folder).st_dev:
        needs.append((folder.parent, num_bytes, "make that folder a link to a larger disk"))
    for place, needed, remedy in needs:
        if (free := shutil.disk_usage(place).free) < needed:
            raise OrreryError(
                f"{place}: {size_text(free)} are free, but {source.repository} needs "
                f"{size_text(needed)}. Free disk space, or {remedy}"
            )


def size_text(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _patient(call: Callable[[], T]) -> T:
    for wait_s in WAITS_S:
        try:
            return call()
        except (httpx2.TransportError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as e:
            status = e.response.status_code if isinstance(e, errors.HfHubHTTPError) else 500
            if constants.is_offline_mode() or (status < 500 and status != 429):
                raise
        except errors.RevisionResolutionError:
            if constants.is_offline_mode():
                raise
        time.sleep(wait_s)
    return call()


@contextmanager
def _explained(kind: Kind, repository: str, revision: str) -> Iterator[None]:
    prefix = "" if kind == "model" else "datasets/"
    page = f"{constants.ENDPOINT}/{prefix}{repository}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise OrreryError(
            f"{repository}: is gated. Accept its terms at {page}, and set HF_TOKEN to a token of "
            f"that account ({constants.ENDPOINT}/settings/tokens)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise OrreryError(
            f"{repository}: {constants.ENDPOINT} has no such {kind}, or it is private. "
            "Correct the name, or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise OrreryError(
            f"{repository}: has no revision {str(revision)!r}. Choose a branch, tag or commit of "
            f"{page}/commits/main"
        ) from error
    except errors.HFValidationError as error:
        raise OrreryError(f"{repository!r}: is no repository. Write OWNER/NAME") from error
    except (errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        if constants.is_offline_mode():
            raise OrreryError(
                f"{repository}: is incomplete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is "
                "set. Unset it, or set HF_HOME to a complete cache"
            ) from error
        raise _unreachable(repository, error.__cause__ or error) from error
    except errors.HfHubHTTPError as error:
        raise OrreryError(
            f"{repository}: {constants.ENDPOINT} answered {error.response.status_code} for "
            f"{error.response.url}. Try again later, or set HF_ENDPOINT to a mirror"
        ) from error
    except httpx2.HTTPError as error:
        raise _unreachable(repository, error) from error


def _unreachable(repository: str, error: BaseException) -> OrreryError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return OrreryError(
        f"{repository}: {constants.ENDPOINT} cannot be reached ({reason[:200]}); type the "
        "command again, or set HF_ENDPOINT to a mirror, or HF_HUB_OFFLINE=1 to use the cache"
    )


@contextmanager
def finished_folder(source: HubRepository, target: Path) -> Iterator[Path]:
    """Yield a temporary folder. On exit, add SHA256SUMS and rename the folder to `target`."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    for stale in target.parent.glob(f".{target.name}.*.tmp"):
        # A killed process left the folder. In a container, this process may have the same pid.
        if stale == temporary or not Path("/proc", stale.name.split(".")[-2]).exists():
            shutil.rmtree(stale, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = [path for path in temporary.rglob("*") if path.is_file()]
        digests = {path.relative_to(temporary).as_posix(): sha256(path) for path in files}
        (temporary / SUMS).write_text(f"# {source.title}\n{sums_text(digests)}")
        publish_folder(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_finished(source: HubRepository, target: Path) -> bool:
    """Return whether `target` exists. Raise OrreryError if its source differs or a file changed."""
    if not target.exists():
        return False
    sums = target / SUMS
    lines = sums.read_text().splitlines() if sums.is_file() else ["# files of unknown origin"]
    if (found := lines[0].removeprefix("# ")) != source.title:
        raise OrreryError(f"{target}: holds {found}, not {source.title}. Move the folder away")
    for name, digest in read_sums(lines[1:]).items():
        if not (target / name).is_file() or sha256(target / name) != digest:
            raise OrreryError(
                f"{target / name}: differs from {SUMS}. Restore it, or move {target} away and "
                "fetch again"
            )
    return True
