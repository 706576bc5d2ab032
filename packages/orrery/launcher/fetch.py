"""Download a model or a dataset, but no code, from the Hugging Face hub.

Names of downloaded dataset files begin with their split.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from orrery.launcher import hub
from orrery.launcher.hub import HubRepository
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.publish import DATA_SUFFIXES, is_data, sha256, write_atomic
from orrery.manifest.render import FETCHED, PRETRAINED
from orrery.manifest.shards import (
    DATA_SUMS,
    Shard,
    data_names,
    files_of,
    files_to_fetch,
    parse_shard,
    write_data_sums,
)

WEIGHTS = "model*.safetensors"
TEMPLATE = "chat_template.jinja"
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    "model.safetensors.index.json",
)
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
CARD = "README.md"
NO_ROWS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
SHA256_DIGITS = 64
SPLITS = ("train", "test", "validation", "valid", "val", "dev")
Splits = dict[str, list[str]]  # split → file names
LOST = (
    "family 'hugging_face' runs transformers' network: without torch.compile, adapters (LoRA), "
    "context and expert parallelism, and replay of routed experts"
)


def fetch_model(word: str, workspace: Workspace, template: Path | None = None) -> list[str]:
    """Fetch the model `word` (OWNER/NAME[@REVISION]). Return lines to print."""
    text = None if template is None else _template_text(template)
    source = hub.find("model", word, (*SETTINGS, WEIGHTS))
    path = f"weights/{source.name}"
    target = workspace.root / path
    axis = workspace.root / "jsonnet" / "models" / f"{_file_name(path)}{PRETRAINED}"
    _check_axis(axis, source)
    settings, weights = _model_files(source)
    if not hub.is_finished(source, target):
        with hub.finished_folder(source, target) as folder:
            hub.download(source, settings, folder)
            if text is not None:
                (folder / TEMPLATE).write_text(text)
            tokenizer = _ask("orrery.tasks.check", "--tokenizer", str(folder))
            _examine(folder, path, source, tokenizer)
            hub.download(source, weights, folder)
            found = _examine(folder, path, source, tokenizer)
    else:
        if text is not None and not _is_text(target / TEMPLATE, text):
            raise OrreryError(
                f"--chat-template {template}: {path} was fetched with another template. "
                f"Move {path} away"
            )
        tokenizer = _ask("orrery.tasks.check", "--tokenizer", str(target))
        found = _examine(target, path, source, tokenizer)
    write_atomic(axis, found["axis"].encode())
    total = sum(source.files[name].num_bytes for name in (*settings, *weights))
    return [
        f"{path}: {source.title}, {hub.size_text(total)}",
        f"{workspace.shown(axis)}: family {found['family']}, {found['num_parameters']:,} "
        "parameters",
        *found["notes"],
        f"write (import 'models/{axis.name}') as the model of a run",
    ]


def _template_text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise OrreryError(
            f"--chat-template {file}: cannot be read ({reason}). Name a Jinja file, such as "
            "examples/problems/plain_chat.jinja"
        ) from None


def _is_text(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def _file_name(path: str) -> str:
    return re.sub(r"\W+", "_", PurePosixPath(path).name.lower())


def _model_files(source: HubRepository) -> tuple[list[str], list[str]]:
    settings = [name for name in SETTINGS if name in source.files]
    weights = [name for name in source.files if fnmatchcase(name, WEIGHTS) and "/" not in name]
    if not weights:
        pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in source.files)
        why = "its weights are pickles, which can run code" if pickles else "it has no weights"
        raise OrreryError(f"{source.repository}: {why}. Choose a repository with {WEIGHTS}")
    for name in NEEDED:
        if name not in settings:
            raise OrreryError(
                f"{source.repository}: has no {name}. Choose a repository with {', '.join(NEEDED)}"
            )
    return settings, weights


def _check_axis(axis: Path, source: HubRepository) -> None:
    if not axis.exists():
        return
    first = axis.read_text(errors="replace").partition("\n")[0]
    if not first.startswith(f"// {source.kind} {source.repository} at "):
        raise OrreryError(f"{axis}: was not written for {source.repository}. Rename that file")


def _examine(
    folder: Path, path: str, source: HubRepository, tokenizer: dict[str, Any]
) -> dict[str, Any]:
    words = ["--path", path, "--title", source.title]
    words += ["--revision", f"{source.repository}@{source.revision.resolved}"]
    found = _ask("orrery.models.axis", str(folder), *words, "--tokenizer", tokenizer["sha256"])
    rows, notes = found["vocab_size"], []
    if tokenizer["num_words"] > rows:
        raise OrreryError(
            f"{source.repository}: its tokenizer has {tokenizer['num_words']} tokens, but the "
            f"embedding has {rows} rows (vocab_size in config.json). Choose another repository"
        )
    if beyond := [word for word, number in tokenizer["added"].items() if number >= rows]:
        notes.append(
            f"note: texts with {', '.join(beyond[:3])} are refused, because the embedding "
            "has no row for them"
        )
    if found["reason"] is not None:
        notes.append(f"note: {LOST} ({found['reason']})")
    return {**found, "notes": notes}


def _ask(module: str, *words: str) -> dict[str, Any]:
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, env=environment
    )
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == 0:
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    last = re.sub(r"[^ ]*/\.([^/ ]+)\.\d+\.tmp", r"\1", last)
    if last.startswith("error: "):
        raise OrreryError(last.removeprefix("error: "))
    raise OrreryError(
        f"python -m {module} ended with code {done.returncode} ({last}). If a package is missing, "
        "type `make setup`"
    )


def fetch_dataset(
    word: str, config: str | None, workspace: Workspace, shard_word: str | None = None
) -> list[str]:
    """Fetch the dataset `word` (OWNER/NAME[@REVISION]). Return lines to print.

    `config`: a name, such as `main` of openai/gsm8k, or None for the only config.
    `shard_word`: K/N, or None for all files.
    """
    shard = None if shard_word is None else parse_shard(shard_word)
    source = hub.find("dataset", word, (CARD,))
    path = f"datasets/{source.name}" + (f"-{config}" if config else "")
    target = workspace.root / path
    sides = workspace.root / "jsonnet" / "tasks" / f"{_file_name(path)}{FETCHED}"
    _check_axis(sides, source)
    if not (hub.is_finished(source, target) and _holds(target, shard)):
        with hub.finished_folder(source, target) as folder:
            _fill(source, config, shard, target, folder)
            found = _ask("orrery.tasks.check", "--dataset", str(folder))
    else:
        found = _ask("orrery.tasks.check", "--dataset", str(target))
    lines = [f"{path}: {source.title}"]
    for split, one in found["splits"].items():
        columns = ", ".join(one["columns"])
        files = _part_text(target, split)
        lines.append(f"split {split}: {one['num_rows']:,} rows{files} with the columns {columns}")
    lines += [f"note: {note}" for note in found["notes"]]
    if shard is not None:
        lines.append(
            f"shard {shard[0]} of {shard[1]}: write num_shards: {shard[1]}, shard_by: 'file' in "
            f"stages.sft.data, and type `orrery join` with --shard {shard[0]}"
        )
    write_atomic(sides, _sides_text(path, source, found).encode())
    return [
        *lines,
        f"sha256 {found['sha256']}",
        f"{workspace.shown(sides)}: source and held_out of a task of kind dataset",
        f"write (import 'tasks/{sides.name}') as the data of examples/problems/mine.jsonnet",
    ]


def _fill(
    source: HubRepository, config: str | None, shard: Shard | None, target: Path, folder: Path
) -> None:
    """Download the dataset's files into `folder`.

    Skip files of other shards, unless `target` has them, or the hub lists no sha256 of them.
    """
    card = [CARD] if CARD in source.files else []
    header = _header(hub.download(source, card, folder).get(CARD))
    chosen = _chosen(source, config, _configs(source, header))
    by_name = {name: split for split, names in chosen.items() for name in names}
    by_path = {
        str(PurePosixPath(name).with_name(_name_of(split, PurePosixPath(name).name))): name
        for name, split in by_name.items()
    }
    if shard is None:
        _download(source, by_path, by_path, folder)
        return
    if hub.constants.is_offline_mode():
        raise OrreryError(
            f"--shard {shard[0]}/{shard[1]}: needs the hub's list of files, and HF_HUB_OFFLINE is "
            "set. Unset it"
        )
    data = [path for path in by_path if is_data(PurePosixPath(path))]
    digests = {path: source.files[by_path[path]].digest for path in data}
    small = {path for path in data if len(digests[path]) != SHA256_DIGITS}
    held = {path for path in data if (target / path).is_file()}
    _download(source, by_path, {*files_to_fetch(data, shard), *small, *held}, folder)
    digests |= {path: sha256(folder / path) for path in small}
    write_data_sums(folder, digests)


def _download(
    source: HubRepository, by_path: dict[str, str], paths: Iterable[str], folder: Path
) -> None:
    placed = hub.download(source, [by_path[path] for path in paths], folder)
    for path in paths:
        placed[by_path[path]].rename(folder / path)


def _holds(target: Path, shard: Shard | None) -> bool:
    if not (target / DATA_SUMS).is_file():
        return True
    names = data_names(target)
    needed = names if shard is None else files_to_fetch(names, shard)
    return all((target / name).is_file() for name in needed)


def _part_text(target: Path, split: str) -> str:
    names = files_of(data_names(target), split)
    num_held = sum((target / name).is_file() for name in names)
    return "" if num_held == len(names) else f" in {num_held} of {len(names)} files"


def _sides_text(path: str, source: HubRepository, found: dict[str, Any]) -> str:
    def side(split: str) -> str:
        return (
            f"{{ kind: 'source', path: '{path}', sha256: '{found['sha256']}', split: '{split}' }}"
        )

    names = list(found["splits"])
    train = "train" if "train" in names else names[0]
    others = sorted((name for name in names if name != train), key=lambda name: name != "test")
    held_out = side(others[0]) if others else "{ kind: 'fraction', fraction: 0.05 }"
    columns = " ".join(", ".join(found["splits"][train]["columns"]).split())
    return (
        f"// {source.title}, with the columns {columns}\n"
        f"{{\n  source: {side(train)},\n  held_out: {held_out},\n}}\n"
    )


def _name_of(split: str, name: str) -> str:
    return name if re.split(r"[-.]", name)[0] == split else f"{split}-{name}"


def _header(card: Path | None) -> dict[str, Any]:
    from huggingface_hub.repocard import metadata_load

    try:
        return (metadata_load(card) if card else None) or {}
    except Exception:  # the YAML parser raises many types of errors
        return {}


def _data_files(header: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (config, split, file patterns) from the metadata in a dataset's card."""
    for one in header.get("configs") or []:
        files = one.get("data_files")
        entries = files if isinstance(files, list) else [files] if files else []
        for entry in entries:
            split, paths = "train", entry
            if isinstance(entry, dict):
                split, paths = entry["split"], entry["path"]
            if not re.fullmatch(r"\w+(\.\w+)*", split):
                raise ValueError(f"{split!r} is no name of a split")
            patterns = [paths] if isinstance(paths, str) else paths
            inside = f"{one['data_dir'].strip('/')}/" if one.get("data_dir") else ""
            allowed = [inside + pattern.removeprefix("./") for pattern in patterns]
            yield one.get("config_name", "default"), split, allowed


def _configs(source: HubRepository, header: dict[str, Any]) -> dict[str, Splits]:
    from huggingface_hub.utils import filter_repo_objects

    data = [
        name
        for name in sorted(source.files)
        if name.endswith(DATA_SUFFIXES) and PurePosixPath(name).name not in NO_ROWS
    ]
    found: dict[str, Splits] = {}
    try:
        for config, split, allowed in _data_files(header):
            splits = found.setdefault(config, {})
            splits.setdefault(split, []).extend(filter_repo_objects(data, allow_patterns=allowed))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise OrreryError(
            f"{source.repository}: `configs` in its {CARD} are malformed ({error!r}); choose "
            f"another revision, such as {source.repository}@refs/convert/parquet"
        ) from error
    if found:
        return found
    for name in data:
        *folders, file = name.split("/")
        split = re.split(r"[-.]", file)[0]
        if (folders and folders[-1] in SPLITS) or len(folders) > 1:
            split = folders.pop()
        config = "default" if not folders or folders[0] == "data" else folders[0]
        found.setdefault(config, {}).setdefault(split, []).append(name)
    return found


def _chosen(source: HubRepository, config: str | None, configs: dict[str, Splits]) -> Splits:
    choices = ", ".join(sorted(configs))
    if not any(names for splits in configs.values() for names in splits.values()):
        raise OrreryError(
            f"{source.repository}: has no file that ends in {', '.join(DATA_SUFFIXES)}. Try the "
            f"hub's conversion {source.repository}@refs/convert/parquet"
        )
    if config is None and len(configs) > 1:
        raise OrreryError(
            f"{source.repository}: has several configs. Add --config with one of {choices}"
        )
    if config is not None and config not in configs:
        raise OrreryError(
            f"--config {config}: {source.repository} has no such config. Choose from {choices}"
        )
    chosen = configs[config] if config is not None else next(iter(configs.values()))
    return {split: names for split, names in chosen.items() if names}
