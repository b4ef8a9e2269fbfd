"""Logging of every process: one line per event on stderr, ``key=value`` pairs, so that grep and machines read it."""

import json
import logging
import sys
import time

LEVELS = ("debug", "info", "warning", "error")


class LineFormatter(logging.Formatter):
    """``at=... level=... process=... from=... message="..."``; a traceback stays on its line, escaped."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = (
            f"at={at}.{int(record.msecs):03d}Z level={record.levelname.lower()} process={self._process} "
            f"from={record.name} message={json.dumps(record.getMessage(), ensure_ascii=False)}"
        )
        if record.exc_info:
            line += f" traceback={json.dumps(self.formatException(record.exc_info), ensure_ascii=False)}"
        return line


def start_logging(process: str, level: str) -> None:
    """All loggers of this process to stderr, as ``process``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
