"""Call etcd's v3 API, as JSON over HTTPS with mutual TLS.

Calls must be idempotent, because the client retries them at all endpoints for `store_s` seconds.
"""

import base64
import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from orrery.elastic.certificates import Certificates
from orrery.elastic.types import ElasticError

REQUEST_S = 2.0
RETRY_S = 0.1
NOT_FOUND = 5
FINAL = (3, NOT_FOUND, 6, 9, 11)  # gRPC codes of invalid requests
BROKEN = (OSError, http.client.HTTPException, ValueError)


class EtcdRefused(Exception):
    """etcd rejected the request as invalid."""

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

        Raise ElasticError if no endpoint answers within `within_s` (default: `store_s`).
        """
        within_s = self._store_s if within_s is None else within_s
        end_s, reason = time.monotonic() + within_s, ""
        while not self.closed.is_set():
            for endpoint in self.endpoints:
                try:
                    return self._ask(endpoint, path, body)
                except BROKEN as error:
                    reason = f"{endpoint}: {error or type(error).__name__}"
                    self._drop(endpoint)
            if time.monotonic() >= end_s:
                break
            self.closed.wait(RETRY_S)
        raise ElasticError(
            f"trainer.elastic.store_timeout_s: no coordinator answered within {within_s:g} s "
            f"({reason}); "
            "the rest of the run goes on if it has a majority of them; check the network, then "
            "type `orrery join` again"
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


def encode(value: bytes | str) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


def decode(value: str) -> bytes:
    return base64.b64decode(value)


def below(prefix: str) -> dict[str, str]:
    return {
        "key": encode(prefix),
        "range_end": encode(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
    }
