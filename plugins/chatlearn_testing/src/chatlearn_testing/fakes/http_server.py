"""A local server for rewards that send requests to an HTTP endpoint, over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from chatlearn_core.exceptions import ContractError


@dataclass(slots=True, frozen=True)
class HttpReply:
    """The server's reply to one request."""

    body: Any = None
    """Sent as JSON, or unchanged if it is bytes."""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    """Send nothing until the server closes."""
    breaks_off: bool = False
    """Close the connection after half of the body."""


def chat_completion(text: str | None) -> HttpReply:
    """A chat completion as OpenAI's API defines it."""
    return HttpReply({"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]})


class FakeHttpServer:
    """Answers each POST by a function of its JSON body.

    Example: ``with FakeHttpServer(lambda body, number: chat_completion("Score: 1")) as server: ask(server.url)``

    Args:
        reply: called in a thread for each request, with the body and the number of the request, from 0.
    """

    def __init__(self, reply: Callable[[Any, int], HttpReply]) -> None:
        self._reply = reply
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        """(path, headers with lower-case names, body) of each request, in order of arrival."""
        self.num_open = 0
        self.most_open = 0
        """Largest number of concurrent requests."""
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        """``http://127.0.0.1:<port>``"""
        if self._server is None:
            raise ContractError("the server is closed; read its url inside the with block")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                fake._serve(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fake http server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        server, self._server = self._server, None
        self._closing.set()
        if server is not None:
            server.shutdown()
            server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            number = len(self.requests)
            self.requests.append((handler.path, headers, body))
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            reply = self._reply(body, number)
            if reply.hangs:
                self._closing.wait()
                return
        finally:
            with self._lock:
                self.num_open -= 1
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        handler.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2] if reply.breaks_off else content)
