"""What is sent to us and is no HTTP: one line in the log, without any of its bytes.

aiohttp answers it with 400 and logs a traceback that quotes it: headers with keys, bodies with
prompts. Whoever speaks TLS to a plain port, or scans ports, would fill the log with them.
"""

from __future__ import annotations

import logging

import structlog
from aiohttp.http_exceptions import HttpProcessingError

log = structlog.get_logger(__name__)


def log_without_bytes() -> None:
    """From now on, for all servers of the process; doing it again changes nothing."""
    logging.getLogger("aiohttp.server").addFilter(_retell)


def _retell(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.info("http.unreadable", cause=type(error).__name__, client=_client(record))
    return False


def _client(record: logging.LogRecord) -> str | None:
    args = record.args
    return str(args[0]) if isinstance(args, tuple) and args else None
