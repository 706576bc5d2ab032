"""The run's certificates: mutual TLS between its sites.

- `make_authority` makes the run's authority, and `make_site` a certificate for each site. The
  authority's key stays where it was made. A site takes `authority.pem` and its two files.
- Both ends of a connection must hold a certificate of this authority. No name is compared, because
  sites move. TLS 1.3 only, without session tickets.
- Validity times are ignored: clocks are never compared across hosts. Certificates end with the run.
"""

import ssl
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orrery.elastic.types import ElasticError
from orrery.runtime.network import LOOPBACK

AUTHORITY = "authority"
NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the module ssl does not name
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
DAYS = "36500"
OPENSSL_S = 60.0


@dataclass(frozen=True)
class Certificates:
    """The files of one site."""

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def of(cls, folder: Path, site: str) -> "Certificates":
        """Return the files in `folder`. Raise ElasticError if one is missing."""
        found = cls(folder / f"{AUTHORITY}.pem", folder / f"{site}.pem", folder / f"{site}.key")
        for path in (found.authority, found.certificate, found.key):
            if not path.is_file():
                raise ElasticError(
                    f"certificates: {path} is missing; copy {AUTHORITY}.pem, {site}.pem and "
                    f"{site}.key from the host on which the run's certificates were made"
                )
        return found

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


def make_authority(folder: Path, run: str) -> None:
    """Write authority.pem and authority.key. Raise ElasticError if the folder holds them."""
    key, certificate = folder / f"{AUTHORITY}.key", folder / f"{AUTHORITY}.pem"
    _check_absent(key)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    uses = ("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch)
        _openssl(
            *("req", "-x509", *NEW_KEY, "-days", DAYS, "-subj", f"/CN=orrery run {run}"),
            *(word for use in uses for word in ("-addext", use)),
            *("-keyout", made / "key", "-out", made / "certificate"),
        )
        (made / "key").replace(key)
        (made / "certificate").replace(certificate)


def make_site(folder: Path, site: str, addresses: Sequence[str] = ()) -> Certificates:
    """Write `site`.pem and `site`.key, signed by the folder's authority.

    A coordinator needs the `addresses` (IP) of its host, because etcd compares them.
    """
    if site == AUTHORITY or not site.replace("-", "").replace("_", "").isalnum():
        raise ElasticError(
            f"site: {site!r} cannot name files; use letters, digits, - and _, and not {AUTHORITY}"
        )
    _check_absent(folder / f"{site}.key")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch)
        uses = made / "uses"
        names = ",".join(f"IP:{each}" for each in dict.fromkeys([*addresses, LOOPBACK]))
        uses.write_text(
            "basicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n"
            f"subjectAltName={names}\n"
        )
        _openssl(
            *("req", *NEW_KEY, "-subj", f"/CN={site}"),
            *("-keyout", made / "key", "-out", made / "request"),
        )
        _openssl(
            *("x509", "-req", "-in", made / "request", "-days", DAYS, "-extfile", uses),
            *("-CA", folder / f"{AUTHORITY}.pem", "-CAkey", folder / f"{AUTHORITY}.key"),
            *("-CAserial", made / "serial", "-CAcreateserial", "-out", made / "certificate"),
        )
        (made / "certificate").replace(folder / f"{site}.pem")
        (made / "key").replace(folder / f"{site}.key")
    return Certificates.of(folder, site)


def _check_absent(key: Path) -> None:
    if key.exists():
        raise ElasticError(
            f"certificates: {key} exists; links that use it would break; use it, or choose another "
            "folder or name"
        )


def _openssl(*words: str | Path) -> None:
    command: Sequence[str] = ["openssl", *map(str, words)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=OPENSSL_S)
    except FileNotFoundError:
        raise ElasticError(
            "openssl: it is missing, and makes the run's certificates; install it "
            "(`apt-get install openssl`)"
        ) from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [str(error)]
        raise ElasticError(
            f"certificates: openssl failed ({said[-1]}); check that {AUTHORITY}.pem and "
            f"{AUTHORITY}.key lie in the folder"
        ) from error
