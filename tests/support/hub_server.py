"""A model hub of one machine: just enough of the Hugging Face API for huggingface_hub to fetch a model from it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_server(models: dict[str, dict[str, bytes]]) -> Iterator[str]:
    """Serves {model: {file: content}}; yields the endpoint's address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            path = self.path.split("?")[0].strip("/")
            for name, files in models.items():
                if path.startswith(f"api/models/{name}"):
                    if "/tree/" in path:
                        return self._json([self._entry(file, content) for file, content in files.items()], with_body)
                    siblings = [{"rfilename": file} for file in files]
                    return self._json({"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}, with_body)
                if path.startswith(f"{name}/resolve/"):
                    file = path.removeprefix(f"{name}/resolve/").split("/", 1)[1]
                    if file in files:
                        return self._file(files[file], with_body)
                    return self._missing("EntryNotFound")
            return self._missing("RepoNotFound")

        def _entry(self, file: str, content: bytes) -> dict[str, object]:
            oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            return {"type": "file", "path": file, "size": len(content), "oid": oid}

        def _json(self, value: object, with_body: bool) -> None:
            self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, with_body)

        def _file(self, content: bytes, with_body: bool) -> None:
            etag = hashlib.sha1(content, usedforsecurity=False).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Content-Type": "application/octet-stream"}
            self._send(200, content, headers, with_body)

        def _missing(self, code: str) -> None:
            self._send(404, b"{}", {"X-Error-Code": code, "X-Repo-Commit": COMMIT}, self.command == "GET")

        def _send(self, status: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
