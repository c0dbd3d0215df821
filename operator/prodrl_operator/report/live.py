"""The live page on loopback: a small HTTP server that hands out what ``local`` last drew."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from plotly.offline import get_plotlyjs

from prodrl_operator.errors import InvalidError
from prodrl_operator.report.page import live_page


class LivePage:
    """Serves ``/``, ``/data.json``, ``/summary.json`` and ``/plotly.js`` until closed."""

    def __init__(self, name: str, port: int) -> None:
        self._documents: dict[str, tuple[str, bytes]] = {
            "/": ("text/html; charset=utf-8", live_page(name).encode()),
            "/plotly.js": ("application/javascript", get_plotlyjs().encode()),
        }
        documents = self._documents

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = documents.get(self.path.split("?")[0])
                self.send_response(200 if found else 404)
                kind, body = found or ("text/plain", b"not here; the page is /\n")
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Silent: the terminal belongs to the view."""

        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        except OSError as exc:
            raise InvalidError(
                f"Live page: port {port} is in use ({exc.strerror}); choose another --page-port"
            ) from exc
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, name="live-page", daemon=True).start()

    def update(self, data: dict[str, Any], summary: dict[str, Any]) -> None:
        """Replace what is handed out."""
        self._documents["/data.json"] = ("application/json", json.dumps(data).encode())
        self._documents["/summary.json"] = ("application/json", json.dumps(summary).encode())

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
