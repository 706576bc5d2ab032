"""Keep a run's ledger (shared state) and its sites' leases in etcd.

- Keys below `orrery/RUN/`: `ledger`, `rounds/NUMBER` and `live/SITE`.
- The client calls etcd's v3 API, as JSON over HTTPS with mutual TLS. It retries calls at all
  endpoints for `store_s` seconds, so calls must be idempotent.
"""

import base64
import http.client
import json
import logging
import math
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from orrery.elastic.certificates import Certificates
from orrery.elastic.ledger import CommittedRound, Ledger
from orrery.elastic.membership import LedgerView
from orrery.elastic.types import ElasticError, LeaseLost

REQUEST_S = 2.0
RETRY_S = 0.1
QUIET_S = 3.0  # log a longer wait for the first answer
NOT_FOUND = 5
FINAL = (3, NOT_FOUND, 6, 9, 11)  # gRPC codes that are not retried
BROKEN = (OSError, http.client.HTTPException, ValueError)
RELEASE_S = 2.0
ELECTION_S = 4.0  # longest time of a leader election with one split vote
EXPIRY_S = 2.0  # longest time from a lease's end to the next round
RETRY_WATCH_S = 0.5
RUNS = "orrery/"
# TLS errors if either side distrusts the other's authority.
UNTRUSTED = ("CERTIFICATE_VERIFY_FAILED", "ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE")
log = logging.getLogger("orrery.elastic.etcd_log")


class EtcdRefused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class KeptConnection(http.client.HTTPSConnection):
    """A connection that closes when its thread ends."""

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()


class EtcdClient:
    def __init__(
        self, endpoints: Sequence[str], certificates: Certificates, store_s: float
    ) -> None:
        self._endpoints = list(endpoints)  # ADDRESS:PORT
        self._tls = certificates.client()
        self._store_s = store_s
        self._own = threading.local()
        self._has_answered = False
        self.closed = threading.Event()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(self._endpoints)

    def use(self, endpoints: Sequence[str]) -> None:
        first = [each for each in self._endpoints[:1] if each in endpoints]
        if endpoints:
            self._endpoints = first + [each for each in endpoints if each not in first]

    def call(self, path: str, body: dict[str, Any], within_s: float | None = None) -> Any:
        """Return etcd's answer. Raise EtcdRefused if etcd rejects the request.

        Raise ElasticError if no endpoint answers within `within_s` (default: `store_s`), and at
        once for an unknown host or authority before the first answer.
        """
        within_s = self._store_s if within_s is None else within_s
        begin_s, reason, is_told = time.monotonic(), "", False
        while not self.closed.is_set():
            for endpoint in self.endpoints:
                try:
                    answer = self._ask(endpoint, path, body)
                    self._has_answered = True
                    return answer
                except BROKEN as error:
                    if not self._has_answered:
                        check_first(endpoint, error)
                    reason = f"{endpoint}: {error or type(error).__name__}"
                    self._drop(endpoint)
            waited_s = time.monotonic() - begin_s
            if waited_s >= within_s:
                break
            if not (is_told or self._has_answered) and waited_s > QUIET_S:
                log.warning("no answer yet from %s; trying for %.0f s", reason, within_s)
                is_told = True
            self.closed.wait(RETRY_S)
        raise ElasticError(
            f"trainer.elastic.store_timeout_s: no coordinator (etcd server) answered within "
            f"{within_s:g} s ({reason}); other sites continue if most coordinators run; check the "
            "network, then type `orrery join` again"
        )

    def stream(self, path: str, body: dict[str, Any], silence_s: float) -> Iterator[Any]:
        """Yield the first endpoint's answers. Raise OSError after `silence_s` without data."""
        connection = self._connect(self.endpoints[0], silence_s)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            while line := answer.readline():
                yield json.loads(line)
        finally:
            connection.close()

    def close(self) -> None:
        self.closed.set()

    def _ask(self, endpoint: str, path: str, body: dict[str, Any]) -> Any:
        kept = self._own.__dict__.setdefault("connections", {})
        if endpoint not in kept:
            kept[endpoint] = self._connect(endpoint, REQUEST_S)
        kept[endpoint].request("POST", path, json.dumps(body))
        answer = kept[endpoint].getresponse()
        found = json.loads(answer.read())
        if answer.status == http.client.OK:
            if self._endpoints[0] != endpoint:
                self.use([endpoint, *(each for each in self.endpoints if each != endpoint)])
            return found
        if found.get("code") in FINAL:
            raise EtcdRefused(found["code"], str(found.get("message", "")))
        raise ValueError(found.get("message", f"status {answer.status}"))

    def _connect(self, endpoint: str, timeout_s: float) -> http.client.HTTPSConnection:
        parts = urlsplit(f"//{endpoint}")
        return KeptConnection(
            parts.hostname or "", parts.port, timeout=timeout_s, context=self._tls
        )

    def _drop(self, endpoint: str) -> None:
        connection = self._own.__dict__.get("connections", {}).pop(endpoint, None)
        if connection is not None:
            with suppress(OSError, ssl.SSLError):
                connection.close()
        if len(self._endpoints) > 1 and self._endpoints[0] == endpoint:
            self._endpoints = [*self._endpoints[1:], endpoint]


def check_first(endpoint: str, error: Exception) -> None:
    """Raise ElasticError for an unknown host or authority, because retries cannot help."""
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME:
        raise ElasticError(
            f"{endpoint}: no such host; type `orrery join RUN ADDRESS:PORT` with the address of a "
            "site that runs"
        )
    reason = error.reason or "" if isinstance(error, ssl.SSLError) else ""
    if any(each in reason for each in UNTRUSTED):
        raise ElasticError(
            f"certificates: {endpoint} and this site have certificates of different authorities "
            f"({reason}); copy authority.pem and this site's files from the host that made the "
            "run's certificates"
        )


def encode(value: bytes | str) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def decode(value: str) -> bytes:
    return base64.b64decode(value)


def below(prefix: str) -> dict[str, str]:
    return {
        "key": encode(prefix),
        "range_end": encode(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
    }


class SiteServices(msgspec.Struct, frozen=True):
    """ADDRESS:PORT of a site's services, or ""."""

    coordinator: str = ""  # the etcd server
    snapshots: str = ""


class EtcdLog:
    def __init__(
        self,
        client: EtcdClient,
        run: str,
        heartbeat_s: float,
        dead_s: float,
        services: SiteServices,
    ) -> None:
        self._client, self._prefix, self._services = client, f"{RUNS}{run}/", services
        self._heartbeat_s, self._dead_s = heartbeat_s, dead_s
        self._site_id, self._lease, self._created = "", "", "0"
        self._changed = threading.Condition()
        self._revision = 0  # newest revision from `read`
        self._news = 0  # newest revision from `_watch`
        self._stop = threading.Event()

    def acquire(self, site_id: str) -> None:
        self.release()
        # The lease is shorter than `dead_s`, because a leader election can prolong it.
        ttl_s = max(
            math.ceil(2 * self._heartbeat_s), math.floor(self._dead_s - ELECTION_S - EXPIRY_S)
        )
        self._site_id, self._created = site_id, ""
        while not self._created:
            self._created = self._take_lease(ttl_s)
        self._stop = threading.Event()
        for body in (self._beat, self._watch):
            thread = threading.Thread(target=body, args=(self._stop,), daemon=True)
            thread.name = f"membership, {body.__name__}"
            thread.start()

    def _take_lease(self, ttl_s: int) -> str:
        """Write the site's key under a new lease.

        Return the key's revision, or "" if the lease ended.
        """
        self._lease = self._client.call("/v3/lease/grant", {"TTL": ttl_s})["ID"]
        key = {"key": encode(f"{self._prefix}live/{self._site_id}")}
        put = key | {"value": encode(msgspec.json.encode(self._services)), "lease": self._lease}
        try:
            self._client.call("/v3/kv/put", put)
        except EtcdRefused as refused:
            if refused.code != NOT_FOUND:
                raise
            return ""
        found = self._client.call("/v3/kv/range", key).get("kvs", [])
        return str(found[0]["create_revision"]) if found else ""

    def release(self) -> None:
        self._stop.set()
        if lease := self._lease:
            self._lease = ""
            with suppress(ElasticError, EtcdRefused):
                self._client.call("/v3/lease/revoke", {"ID": lease}, RELEASE_S)

    def read(self) -> LedgerView:
        asked = [
            {"request_range": {"key": encode(f"{self._prefix}ledger")}},
            {"request_range": below(f"{self._prefix}live/") | {"keys_only": True}},
        ]
        answer = self._client.call("/v3/kv/txn", {"success": asked})
        with self._changed:
            self._revision = max(self._revision, int(answer["header"]["revision"]))
        ledger, live = (each["response_range"].get("kvs", []) for each in answer["responses"])
        ids = _site_ids(live)
        if not ledger:
            self._check_run()
            return LedgerView(Ledger(), 0, ids)
        value = msgspec.json.decode(decode(ledger[0]["value"]), type=Ledger)
        return LedgerView(value, int(ledger[0]["mod_revision"]), ids)

    def _check_run(self) -> None:
        """Raise ElasticError if etcd holds another run."""
        asked = below(RUNS) | {"keys_only": True, "limit": "1"}
        for each in self._client.call("/v3/kv/range", asked).get("kvs", []):
            own, other = (x.split("/")[1] for x in (self._prefix, decode(each["key"]).decode()))
            if other != own:
                raise ElasticError(
                    f"manifest: the other sites have run {other}, and this site has {own}; copy "
                    "their manifest and join with it"
                )

    def write(self, ledger: Ledger, view: LedgerView) -> bool:
        key, own = encode(f"{self._prefix}ledger"), encode(f"{self._prefix}live/{self._site_id}")
        puts = [_put(key, msgspec.json.encode(ledger))]
        if (row := ledger.committed) is not None and row != view.ledger.committed:
            name = encode(f"{self._prefix}rounds/{row.number:09d}")
            puts.append(_put(name, msgspec.json.encode(row)))
        answer = self._client.call(
            "/v3/kv/txn",
            {
                "compare": [
                    {"key": key, "target": "MOD", "mod_revision": str(view.revision)},
                    {"key": own, "target": "CREATE", "create_revision": self._created},
                ],
                "success": puts,
                "failure": [{"request_range": {"key": own}}],
            },
        )
        if answer.get("succeeded"):
            return True
        found = answer["responses"][0]["response_range"].get("kvs", [])
        if not found or found[0]["create_revision"] != self._created:
            raise LeaseLost(f"site {self._site_id[:8]} has lost its lease")
        return False

    def wait(self, view: LedgerView, timeout_s: float) -> LedgerView:
        end_s = self.now_s() + timeout_s
        while True:
            left_s = end_s - self.now_s()
            with self._changed:
                # The watch may miss changes, so also poll the ledger.
                self._changed.wait_for(
                    lambda: self._news > self._revision,
                    max(0.0, min(left_s, self._heartbeat_s / 2)),
                )
            found = self.read()
            if found != view or self.now_s() >= end_s:
                return found

    def now_s(self) -> float:
        return time.monotonic()

    def rounds(self) -> Iterator[CommittedRound]:
        answer = self._client.call("/v3/kv/range", below(f"{self._prefix}rounds/"))
        for each in answer.get("kvs", []):
            yield msgspec.json.decode(decode(each["value"]), type=CommittedRound)

    def live(self, within_s: float) -> frozenset[str]:
        asked = below(f"{self._prefix}live/") | {"keys_only": True}
        return _site_ids(self._client.call("/v3/kv/range", asked, within_s).get("kvs", []))

    def services(self, within_s: float | None = None) -> list[SiteServices]:
        answer = self._client.call("/v3/kv/range", below(f"{self._prefix}live/"), within_s)
        values = (decode(each["value"]) for each in answer.get("kvs", []))
        return [msgspec.json.decode(value, type=SiteServices) for value in values]

    def _beat(self, stop: threading.Event) -> None:
        # A lease may last only two heartbeats.
        while not stop.wait(self._heartbeat_s / 2):
            with suppress(ElasticError, EtcdRefused):
                lease = {"ID": self._lease}
                self._client.call("/v3/lease/keepalive", lease, self._heartbeat_s)

    def _watch(self, stop: threading.Event) -> None:
        while not stop.is_set():
            asked: dict[str, Any] = below(self._prefix) | {
                "start_revision": str(max(self._revision, self._news) + 1)
            }
            with suppress(*BROKEN, KeyError):
                asked = {"create_request": asked}
                for answer in self._client.stream("/v3/watch", asked, self._dead_s):
                    if stop.is_set():
                        return
                    with self._changed:
                        news = int(answer["result"]["header"]["revision"])
                        self._news = max(self._news, news)
                        self._changed.notify_all()
            stop.wait(RETRY_WATCH_S)


def _site_ids(keys: list[dict[str, str]]) -> frozenset[str]:
    return frozenset(decode(each["key"]).decode().rpartition("/")[2] for each in keys)


def _put(key: str, value: bytes) -> dict[str, Any]:
    return {"request_put": {"key": key, "value": encode(value)}}
