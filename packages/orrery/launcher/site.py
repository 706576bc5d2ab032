"""Read the site file (TOML): settings of a machine or cluster. They do not change a run's id.

ORRERY_SITE names the file, by default `site.toml` in the checkout.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.schema import Record

VARIABLE = "ORRERY_SITE"
FILE = "site.toml"
EXAMPLE = "docs/site.example.toml"
SECRET = re.compile(
    r"TOKEN(?!IZER)|SECRET|PASSW|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.IGNORECASE
)

# sbatch options that `extra` may not set
RESERVED = set(
    """
    nodes N ntasks n ntasks-per-node gres gpus-per-node gpus G cpus-per-task c mem time t
    partition p account A job-name J output o error e comment signal requeue no-requeue
    wrap parsable array a dependency d mem-per-cpu mem-per-gpu gpus-per-task gpus-per-socket
    cpus-per-gpu export chdir D het-group hold H begin b wait W
    """.split()  # noqa: SIM905
)


def is_reserved(option: str) -> bool:
    """Return whether an sbatch option is reserved, such as `-px`, `-vpx` or `--part=x`."""
    if found := re.match(r"--(\w[\w-]*)", option):
        return any(len(one) > 1 and one.startswith(found[1]) for one in RESERVED)
    # Options with these letters take no value, so another letter may follow.
    found = re.match(r"-[IkOQsuvV]*(\w)", option)
    return found is not None and found[1] in RESERVED


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.@:+-]+(,[\w.@:+-]+)*", text):
        raise ValueError(f"{text!r} is not a name. Use letters, digits and . _ - @ : +")
    return text


Word = Annotated[str, AfterValidator(_word)]
NoWord = Annotated[str, AfterValidator(lambda text: text and _word(text))]


class Slurm(Record):
    partition: Word
    cpu_partition: NoWord = ""  # for jobs without GPUs. If empty, use `partition`.
    account: NoWord = ""
    time_limit_min: PositiveInt
    warning_s: Annotated[int, Field(gt=0, le=65535)] = 300
    gpu_type: NoWord = ""
    cpus_per_node: PositiveInt
    memory_per_node_mb: PositiveInt
    poll_s: PositiveInt = 10
    extra: Annotated[tuple[str, ...], Field(strict=False)] = ()
    pre_run: Annotated[tuple[str, ...], Field(strict=False)] = ()
    template: str = ""  # path of a Jinja2 job script, relative to the checkout

    @model_validator(mode="after")
    def pre_run_holds_no_secrets(self) -> "Slurm":
        for line in self.pre_run:
            if SECRET.search(line):
                raise ValueError(
                    f"pre_run: {line!r} looks like a secret. Export it in your shell instead"
                )
        return self

    @model_validator(mode="after")
    def extra_leaves_ours_alone(self) -> "Slurm":
        for option in self.extra:
            if is_reserved(option):
                raise ValueError(
                    f"extra: {option!r} is set from the manifest or another key of [slurm]. "
                    "Remove it"
                )
            if not re.fullmatch(r"--?[A-Za-z][\w-]*(=[^\s'\"\\]+)?", option):
                raise ValueError(
                    f"extra: {option!r} is not one sbatch option. Write '--name' or '--name=value'"
                )
        return self

    @model_validator(mode="after")
    def warning_is_before_the_limit(self) -> "Slurm":
        limit_s = 60 * self.time_limit_min
        if self.warning_s >= limit_s:
            raise ValueError(
                f"warning_s {self.warning_s} is not below the time limit of {limit_s} s. "
                "Lower warning_s"
            )
        return self


def _mount(text: str) -> str:
    parts = text.split(":")
    is_absolute = all(part.startswith("/") for part in parts[:2])
    if not is_absolute or parts[2:] not in ([], ["ro"], ["rw"]) or "," in text:
        raise ValueError(f"{text!r} is not 'SRC', 'SRC:DST' or 'SRC:DST:ro' with absolute folders")
    return text


class Containers(Record):
    images: Annotated[str, AfterValidator(lambda text: str(Path(text).expanduser()))]
    mounts: Annotated[tuple[Annotated[str, AfterValidator(_mount)], ...], Field(strict=False)] = ()
    scratch: Annotated[str, Field(pattern=r"^/[\w./+-]*$")] = "/tmp"
    modules: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[\w.@:+/-]+$")], ...], Field(strict=False)
    ] = ()


class Network(Record):
    interface: Word
    gbit_per_s: PositiveFloat = 400.0  # bandwidth per device, for `orrery plan` and reports

    @property
    def bytes_per_s(self) -> float:
        return self.gbit_per_s * 1e9 / 8


class Roles(Record):
    """Settings of all roles. `deadline_scale` multiplies deadlines.

    `checkpoint_target`: fsspec URL of a folder for copies of complete checkpoints.
    """

    deadline_scale: PositiveFloat = 1.0
    checkpoint_target: Annotated[str, Field(pattern=r"^([a-z0-9]+://\S+)?$")] = ""


class Site(Record):
    slurm: Slurm | None = None
    containers: Containers | None = None
    network: Network | None = None
    roles: Roles = Roles()
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def environment_is_not_ours(self) -> "Site":
        for name in self.environment:
            if name.startswith(("ORRERY_", "SLURM_", "APPTAINER")):
                raise ValueError(f"environment: {name} is set by the launcher. Remove it")
            if SECRET.search(name):
                raise ValueError(
                    f"environment: {name} looks like a secret. Export it in your shell instead"
                )
        return self


def site_path(workspace: Workspace) -> Path | None:
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    path = workspace.root / FILE
    return path if path.exists() else None


def load_site(workspace: Workspace) -> Site:
    path = site_path(workspace)
    if path is None:
        return Site()
    try:
        return Site.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except UnicodeDecodeError:
        raise OrreryError(f"{workspace.shown(path)}: not UTF-8. Save it as UTF-8") from None
    except OSError as error:
        raise OrreryError(
            f"{path}: cannot be read ({error.strerror}); {VARIABLE} names the site file"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise OrreryError(
            f"{workspace.shown(path)}: not TOML: {error}. "
            'Texts need quotes, as in partition = "gpu"'
        ) from None
    except ValidationError as error:
        raise OrreryError(f"{workspace.shown(path)}: {_sentence(error)}") from None


def cluster(workspace: Workspace) -> Slurm:
    site = load_site(workspace)
    if site.slurm is None:
        where = site_path(workspace)
        if where is None:
            raise OrreryError(
                f"{FILE}: does not exist, and its [slurm] describes the cluster. "
                f"Type `cp {EXAMPLE} {FILE}` and edit it"
            )
        raise OrreryError(f"{workspace.shown(where)}: has no [slurm]. Copy it from {EXAMPLE}")
    return site.slurm


def check_network(site: Site, num_nodes: int, what: str) -> None:
    if num_nodes > 1 and site.network is None:
        raise OrreryError(
            f"network.interface: {what} has {num_nodes} nodes, but the site file has no [network]. "
            "Name the interface that nodes reach one another on (`ip address` shows them)"
        )


def _sentence(error: ValidationError) -> str:
    # Report a misspelt key first, because the correct key is then missing too.
    first = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        tables: dict[str, type[Record]]
        tables = {"slurm": Slurm, "containers": Containers, "network": Network, "roles": Roles}
        model = tables.get(str(first["loc"][0]), Site) if len(first["loc"]) > 1 else Site
        near = nearest(str(first["loc"][-1]), list(model.model_fields))
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(model.model_fields)}"
        return f"{field}: there is no such key; {hint}"
    if first["type"] == "missing":
        return f"{field}: is missing; {EXAMPLE} shows what to write"
    if first["type"] == "value_error":
        return f"{field}: {first['ctx']['error']}" if field else str(first["ctx"]["error"])
    words = {
        "tuple_type": 'is not a list; write ["…"]',
        "string_type": "is not a text; put it in quotes",
        "int_type": "is not a whole number, in the unit that the key's name ends with",
        "string_pattern_mismatch": "is not a valid value",
    }
    return f"{field}: {first['input']!r} {words.get(first['type'], first['msg'].lower())}"
