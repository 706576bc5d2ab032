"""Lock the Debian packages of an image, and unpack a lock into a root file system.

    python containers/debian.py lock cpu      write debian.cpu.lock; needs apt of Debian 12
    python containers/debian.py unpack containers/debian.cpu.lock ROOT CACHE

- A lock's first line dates a snapshot that holds all packages. Each further line is
  `name version sha256 path`, with the path below a mirror.
- `unpack` verifies every sha256 and runs no package scripts. It makes the accounts and the
  certificate bundle itself, so it needs neither root nor Debian.
- Packages come from DEBIAN_MIRROR (a folder or address with `debian/` and `debian-security/`) if
  it is set. Otherwise from apt's mirror, deb.debian.org or snapshot.debian.org, in this order.
"""

import hashlib
import io
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
DEBIAN = "http://deb.debian.org"
SNAPSHOT = "http://snapshot.debian.org/archive/{archive}/{time}/{path}"
MERGED = ("bin", "sbin", "lib", "lib64")  # links into /usr that packages still write through
LEFT_OUT = re.compile(
    r"usr/share/(?:doc/(?!.*/copyright$)|man/|info/|locale/|lintian/|doc-base/).*"
)


class Package(NamedTuple):
    """A package file. `path` begins with the archive, `debian` or `debian-security`."""

    name: str
    version: str
    sha256: str
    path: str


class Lock(NamedTuple):
    """Packages sorted by name. `time` names a snapshot that has them all (`20261120T000000Z`)."""

    time: str
    packages: tuple[Package, ...]


def read_lock(path: Path) -> Lock:
    """Read a lock. Raise ValueError if a line names no package."""
    lines = path.read_text().splitlines()
    packages = []
    for line in lines[1:]:
        if len(line.split()) != 4:
            raise ValueError(
                f"{path.name}: {line!r} is not 'name version sha256 path'; write the lock anew"
            )
        packages.append(Package(*line.split()))
    return Lock(lines[0].removeprefix("snapshot "), tuple(packages))


def addresses(package: Package, time: str) -> list[str]:
    """Return the addresses of a package, in the order of trying."""
    path = urllib.parse.quote(package.path)
    if named := os.environ.get("DEBIAN_MIRROR"):
        base = named if "://" in named else Path(named).resolve().as_uri()
        return [f"{base.rstrip('/')}/{path}"]
    archive, _, rest = path.partition("/")
    local = [f"{base}/{rest}" for base in apt_mirrors() if base.endswith(f"/{archive}")]
    return list(
        dict.fromkeys(
            [*local, f"{DEBIAN}/{path}", SNAPSHOT.format(archive=archive, time=time, path=rest)]
        )
    )


def apt_mirrors(folder: Path = Path("/etc/apt/sources.list.d")) -> list[str]:
    """Return the addresses that apt uses on this machine, [] without apt."""
    return [
        address.rstrip("/")
        for file in sorted(folder.glob("*.sources"))
        for address in re.findall(r"(?m)^URIs: *(\S+)", file.read_text())
    ]


def fetch(package: Package, time: str, cache: Path) -> Path:
    """Return the package's file in `cache`, verified.

    Raise OSError with every address that was tried if none has the file.
    """
    path = cache / f"{package.sha256[:16]}-{PurePosixPath(package.path).name}"
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256:
        return path
    tried = []
    for address in addresses(package, time):
        try:
            with urllib.request.urlopen(address, timeout=60) as response:
                data = response.read()
        except (urllib.error.URLError, OSError) as error:
            tried.append(f"{address}: {error}")
            continue
        if hashlib.sha256(data).hexdigest() != package.sha256:
            tried.append(f"{address}: another file than the lock names")
            continue
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)
        return path
    raise OSError(
        f"{package.name} {package.version} could not be fetched; "
        f"set DEBIAN_MIRROR to a mirror that has it: {'; '.join(tried)}"
    )


def members(deb: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the members of a Debian package, an `ar` archive (deb(5))."""
    data = deb.read_bytes()
    at = 8
    while at < len(data):
        name, size = data[at : at + 16].decode().strip().rstrip("/"), int(data[at + 48 : at + 58])
        yield name, data[at + 60 : at + 60 + size]
        at += 60 + size + size % 2


def unpack(deb: Path, root: Path) -> str:
    """Unpack a package into `root`, owned by root, none setuid. Return its control stanza."""
    control = ""
    for name, data in members(deb):
        if not name.startswith(("control.tar", "data.tar")):
            continue
        content = lzma.decompress(data) if name.endswith(".xz") else data
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            if name.startswith("control.tar"):
                file = archive.extractfile("./control")
                assert file is not None
                control = file.read().decode()
            else:
                # Python before 3.12 extracts every member unfiltered; do the same after it.
                archive.extraction_filter = lambda member, _: member
                archive.extractall(root, [one for one in archive if _settle_member(one)])
    return control


def _settle_member(member: tarfile.TarInfo) -> bool:
    """Return whether the image holds the member, and set the member's owner and mode."""
    path = member.name.removeprefix("./").rstrip("/")
    if not path or path in MERGED or (LEFT_OUT.match(path) and not member.isdir()):
        return False
    member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
    member.mode = 0o755 if member.isdir() else member.mode & 0o755
    return True


def make_root(lock: Path, root: Path, cache: Path) -> None:
    """Unpack all packages of a lock into the empty folder `root`."""
    time, packages = read_lock(lock)
    cache.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(8) as pool:
        debs = list(pool.map(lambda package: fetch(package, time, cache), packages))
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    stanzas = []
    for package, deb in zip(packages, debs, strict=True):
        stanza = unpack(deb, root)
        if f"Version: {package.version}\n" not in stanza:
            raise ValueError(
                f"{lock.name}: the file of {package.name} is not version {package.version}; "
                "write the lock anew"
            )
        stanzas.append(stanza.replace("\n", "\nStatus: install ok installed\n", 1))
    _settle(root, stanzas)


def _settle(root: Path, stanzas: list[str]) -> None:
    """Make the files that the packages' scripts would have made."""
    for folder in ("tmp", "var/tmp", "var/lib/dpkg", "etc/ssl/certs", "orrery/code", "orrery/run"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for folder in ("tmp", "var/tmp"):
        (root / folder).chmod(0o1777)
    (root / "var/lib/dpkg/status").write_text("\n".join(stanzas))  # what scanners read
    for name in ("passwd", "group"):
        (root / "etc" / name).write_bytes(
            (root / f"usr/share/base-passwd/{name}.master").read_bytes()
        )
    for path in ("resolv.conf", "hosts", "localtime"):  # bound over when a container starts
        (root / "etc" / path).touch()
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    certificates = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.write_text(
        "".join(certificate.read_text().rstrip("\n") + "\n" for certificate in certificates)
    )


def write_lock(hardware: str) -> None:
    """Write debian.<hardware>.lock from debian.<hardware>.in with the newest versions of apt."""
    names = [
        line
        for line in (HERE / f"debian.{hardware}.in").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for part in ("lists/partial", "cache/archives/partial"):
            (work / part).mkdir(parents=True)
        (work / "status").touch()
        settings = {
            "Dir::State": folder,
            "Dir::State::lists": work / "lists",
            "Dir::State::status": work / "status",
            "Dir::Cache": work / "cache",
        }
        apt = [
            "apt-get",
            "-qq",
            *(f"-o{key}={value}" for key, value in settings.items()),
            f"-oAPT::Sandbox::User={os.environ.get('USER', 'root')}",
        ]
        subprocess.run([*apt, "update"], check=True)
        install = [*apt, "install", "--yes", "--no-install-recommends", *names]
        listed = subprocess.run(
            [*install, "--print-uris"], check=True, capture_output=True, text=True
        ).stdout
        subprocess.run([*install, "--download-only"], check=True, stdout=subprocess.DEVNULL)
        packages = sorted(_locked(line, work / "cache/archives") for line in listed.splitlines())
        releases = "".join(path.read_text() for path in (work / "lists").glob("*Release"))
    dates = [
        datetime.strptime(date, "%a, %d %b %Y %H:%M:%S UTC")
        for date in re.findall(r"(?m)^Date: (.*)$", releases)
    ]
    midnight = max(dates).replace(hour=0, minute=0, second=0) + timedelta(days=1)
    lines = [f"snapshot {midnight:%Y%m%dT%H%M%SZ}", *(" ".join(package) for package in packages)]
    (HERE / f"debian.{hardware}.lock").write_text("\n".join(lines) + "\n")
    print(f"debian.{hardware}.lock: {len(packages)} packages of {lines[0]}")


def _locked(line: str, downloads: Path) -> Package:
    """Parse a line of `apt-get --print-uris`: `'address' file size digest`."""
    address, file = line.split()[:2]
    path = re.search(r"/(debian(?:-security)?/pool/.*)'$", address)
    if path is None:
        raise ValueError(
            f"{address}: no archive of Debian; lock on a Debian 12 that uses its archives only"
        )
    name, version, _ = file.removesuffix(".deb").split("_")
    return Package(
        name,
        urllib.parse.unquote(version),
        hashlib.sha256((downloads / file).read_bytes()).hexdigest(),
        urllib.parse.unquote(path[1]),
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["lock", hardware]:
            write_lock(hardware)
        case ["unpack", lock, root, cache]:
            make_root(Path(lock), Path(root), Path(cache))
        case _:
            sys.exit(__doc__)
