"""Make and load certificates for mutual TLS between a run's sites.

- TLS does not check host names, because sites' addresses may change.
- Only etcd's TLS checks validity dates.
"""

import re
import ssl
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from orrery.elastic.types import ElasticError

AUTHORITY = "authority"
NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, missing in `ssl`
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
VALID = ("-startdate", "20200101000000Z", "-enddate", "21000101000000Z")
SIGNING = """
[ca]
default_ca = authority
[authority]
database = {folder}/index
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = policy
[policy]
commonName = supplied
[extensions]
{extensions}
"""
OPENSSL_S = 60.0


@dataclass(frozen=True)
class Certificates:
    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path, site: str) -> "Certificates":
        found = cls(folder / f"{AUTHORITY}.pem", folder / f"{site}.pem", folder / f"{site}.key")
        for path in (found.authority, found.certificate, found.key):
            if not path.is_file():
                raise ElasticError(
                    f"certificates: {path} is missing; copy {AUTHORITY}.pem, {site}.pem and "
                    f"{site}.key from the host that made the run's certificates, or name another "
                    "site with --name"
                )
        return found

    def validity(self) -> tuple[float, float]:
        """Return the authority's first and last valid time, in Unix seconds."""
        found, *_ = self.client().get_ca_certs()
        dates = (found["notBefore"], found["notAfter"])
        first, last = (ssl.cert_time_to_seconds(str(each)) for each in dates)
        return first, last

    def server(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return context

    def client(self) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_flags |= NO_CHECK_TIME
        try:
            context.load_verify_locations(self.authority)
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ElasticError(
                f"certificates: {self.certificate} or {self.authority} cannot be used ({error}); "
                "copy the site's files again"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def check_clock(not_before_s: float, not_after_s: float) -> None:
    now_s = time.time()
    if not_before_s <= now_s <= not_after_s:
        return
    now, first, last = (
        time.strftime("%Y-%m-%d %H:%M", time.gmtime(t)) for t in (now_s, not_before_s, not_after_s)
    )
    raise ElasticError(
        f"clock: this host says {now} UTC, and the run's certificate is valid from {first} to "
        f"{last}; set the clock (`date -u` shows it), or ask for a new certificate"
    )


def make_authority(folder: Path, run: str) -> None:
    _check_absent(folder / f"{AUTHORITY}.key")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    uses = ("basicConstraints = critical,CA:TRUE,pathlen:0", "keyUsage = critical,keyCertSign")
    _make(folder, AUTHORITY, f"orrery run {run}", uses)


def make_site(folder: Path, site: str, addresses: Sequence[str] = ()) -> Certificates:
    """Write the site's key and certificate for `addresses`.

    Raise ElasticError if the key exists or a name is invalid.
    """
    if site == AUTHORITY or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", site):
        raise ElasticError(
            f"site: {site!r} cannot name files; use up to 64 letters, digits, - and _, and not "
            f"{AUTHORITY}"
        )
    _check_absent(folder / f"{site}.key")
    names = ",".join(map(_alternative, ("127.0.0.1", "localhost", *addresses)))
    uses = ("basicConstraints = CA:FALSE", "extendedKeyUsage = serverAuth,clientAuth")
    _make(folder, site, site, (*uses, f"subjectAltName = {names}"))
    return Certificates.of(folder, site)


def _alternative(name: str) -> str:
    try:
        return f"IP:{ip_address(name)}"
    except ValueError:
        if re.fullmatch(r"[A-Za-z0-9.-]+", name):
            return f"DNS:{name}"
        raise ElasticError(
            f"address: {name!r} is neither an IP address nor a host name; use one of them"
        ) from None


def _make(folder: Path, name: str, common_name: str, extensions: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch)
        (made / "index").touch()
        config = made / "config"
        config.write_text(SIGNING.format(folder=made, extensions="\n".join(extensions)))
        subject = f"/CN={common_name.replace('/', '_')[:64]}"
        request = ("-subj", subject, "-keyout", made / "key", "-out", made / "request")
        _openssl("req", "-config", config, *NEW_KEY, *request)
        ours = folder / AUTHORITY
        signer: tuple[str | Path, ...] = ("-selfsign", "-keyfile", made / "key")
        if name != AUTHORITY:
            signer = ("-cert", ours.with_suffix(".pem"), "-keyfile", ours.with_suffix(".key"))
        output = ("-extensions", "extensions", "-in", made / "request", "-out", made / "signed")
        _openssl("ca", "-batch", "-notext", "-config", config, *signer, *VALID, *output)
        (made / "signed").replace(folder / f"{name}.pem")
        (made / "key").replace(folder / f"{name}.key")


def _check_absent(key: Path) -> None:
    if key.exists():
        raise ElasticError(
            f"certificates: {key} exists and is not overwritten; use it, or choose another folder "
            "or name"
        )


def _openssl(*words: str | Path) -> None:
    command: Sequence[str] = ["openssl", *map(str, words)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=OPENSSL_S)
    except FileNotFoundError:
        raise ElasticError(
            "openssl: missing, but it makes the run's certificates; type `apt-get install openssl`"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [str(error)]
        raise ElasticError(
            f"certificates: openssl failed ({said[-1]}); check that {AUTHORITY}.pem and "
            f"{AUTHORITY}.key are in the folder of certificates"
        ) from error
