"""The operator's log, as lines of text or of JSON. Called by ``cli``."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One object a line, with the fields that collectors look for."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(is_json: bool) -> None:
    """Everything to standard error, at level INFO."""
    handler = logging.StreamHandler()
    if is_json:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each look at each gateway otherwise
    logging.captureWarnings(capture=True)
