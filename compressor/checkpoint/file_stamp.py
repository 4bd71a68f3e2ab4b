"""What a file looks like from outside: enough to notice that somebody touched it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class FileStamp:
    """What tells that a file was touched: size in bytes and time of its last change (ctime) in nanoseconds.

    Not the modification time: whoever edits a file in place can set that back.
    """

    size_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(status.st_size, status.st_ctime_ns)
