"""A Hugging Face hub on loopback: info, trees in pages, HEAD and GET with redirects, ranges."""

import hashlib
import json
import re
import select
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback"
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")
RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
LARGE_BYTES = 2048  # as LFS: redirected to another host


class Hub:
    """Repositories by name, and faults. `requests` lists (method, path, headers)."""

    def __init__(self):
        self.repositories = {}  # "models/owner/name" → (commit, {path: bytes})
        self.gated = set()
        self.breaks = 0  # downloads that end in the middle
        self.failing = 0  # API calls to answer with 503
        self.slow_heads = 0  # HEAD requests that get no answer within 9 s
        self.given_up = 0  # slow HEAD requests that the client closed within 9 s
        self.is_xet = False  # also offers files by Xet, at an address without a server
        self.wrong = set()  # paths with other bytes of the same size
        self.sizes = {}  # false sizes in the tree
        self.requests = []

    def add(self, name: str, folder: Path, kind: str = "models") -> str:
        files = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.repositories[f"{kind}/{name}"] = (commit, files)
        return commit

    @contextmanager
    def serving(self):
        class Handler(_Handler):
            hub = self

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.port = server.server_port
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        if self.hub.slow_heads > 0:
            self.hub.slow_heads -= 1
            readable, _, _ = select.select([self.connection], [], [], 9)
            self.hub.given_up += bool(readable)  # the client has closed the connection
            self.close_connection = True
            return
        self._answer(with_body=False)

    def do_GET(self):
        self._answer(with_body=True)

    def _answer(self, with_body: bool):
        url = urlsplit(self.path)
        path, hub = unquote(url.path), self.hub
        headers = {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append((self.command, path, headers))
        if path.startswith("/cdn/"):
            self._send_file(path.removeprefix("/cdn/"), with_body)
        elif found := API.fullmatch(path):
            if hub.failing > 0:
                hub.failing -= 1
                self._send(503, b"busy")
            else:
                self._api(*found.groups(), parse_qs(url.query))
        elif found := RESOLVE.fullmatch(path):
            kind = "datasets" if found[1] else "models"
            self._resolve(f"{kind}/{found[2]}", found[3], found[4], with_body)
        else:
            self._send(404, b"")

    def _repository(self, name, revision):
        """Return (commit, files), or send why not and return None."""
        if name not in self.hub.repositories:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        commit, files = self.hub.repositories[name]
        if revision not in (None, "main", "v1", commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, files

    def _api(self, kind, name, what, revision, query):
        if (found := self._repository(f"{kind}/{name}", revision)) is None:
            return
        commit, files = found
        if what != "tree":
            self._json({"id": name, "sha": commit, "private": False, "tags": [], "siblings": []})
            return
        listed = [self._listed(path, data) for path, data in files.items()]
        half = len(listed) // 2
        if "cursor" in query:
            self._json(listed[half:])
        else:
            link = f'<http://127.0.0.1:{self.hub.port}{self.path}&cursor=2>; rel="next"'
            self._json(listed[:half], {"Link": link})

    def _listed(self, path, data):
        size = self.hub.sizes.get(path, len(data))
        entry = {"type": "file", "path": path, "size": size, "oid": _git_sha1(data)}
        if len(data) >= LARGE_BYTES:
            digest = hashlib.sha256(data).hexdigest()
            entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
        return entry

    def _resolve(self, name, revision, path, with_body):
        if (found := self._repository(name, revision)) is None:
            return
        commit, files = found
        if name in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._send(401, b"", {"X-Error-Code": "GatedRepo"})
            return
        if path not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = files[path]
        if len(data) < LARGE_BYTES:
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_sha1(data)}"'}
            self._send(200, self._bytes(name, path) if with_body else data, headers)
            return
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"http://localhost:{self.hub.port}/cdn/{name}/{path}",
        }
        if self.hub.is_xet:
            headers["X-Xet-Hash"] = hashlib.sha256(data).hexdigest()
            headers["X-Xet-Refresh-Route"] = f"http://127.0.0.1:{self.hub.port}/xet"
        self._send(302, b"", headers)

    def _bytes(self, name, path):
        data = self.hub.repositories[name][1][path]
        return bytes(byte ^ 1 for byte in data) if path in self.hub.wrong else data

    def _send_file(self, path, with_body):
        kind, owner, name, rest = path.split("/", 3)
        data, status, headers = self._bytes(f"{kind}/{owner}/{name}", rest), 200, {}
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            begin = int(wanted[1])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        if with_body and self.hub.breaks > 0:
            self.hub.breaks -= 1
            self._head(status, len(data), headers)
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self._send(status, data, headers)

    def _json(self, content, headers=None):
        typed = {"Content-Type": "application/json", **(headers or {})}
        self._send(200, json.dumps(content).encode(), typed)

    def _send(self, status, data, headers=None):
        self._head(status, len(data), headers or {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _head(self, status, length, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
