"""HTTP/1.1 with a bound on the request head, which uvicorn's fast parser leaves open. Used by ``server``."""

from __future__ import annotations

import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from prodrl.gateway.wire import Refusal


def bounded_protocol(max_header_bytes: int) -> type[HttpToolsProtocol]:
    """A protocol class that answers 431 and closes when a head does not end within the limit.

    A head that ends in time but is too long is ``app``'s to refuse.
    """
    message = f"Request: headers are larger than {max_header_bytes} bytes; send fewer"
    body = json.dumps(Refusal(431, message, code="headers_too_large").body()).encode()
    answer = (
        b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
        b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
    )

    class BoundedProtocol(HttpToolsProtocol):
        """One connection."""

        _is_in_head = False
        _head_bytes = 0

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._is_in_head:
                return
            self._head_bytes += len(data)
            if self._head_bytes > max_header_bytes and not self.transport.is_closing():
                self.transport.write(answer)
                self.transport.close()

        def on_message_begin(self) -> None:
            self._is_in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._is_in_head = False
            super().on_headers_complete()

    return BoundedProtocol
