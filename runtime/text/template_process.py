"""Asks the process that renders chat templates, and starts it when there is something to render."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from memopt.errors import MemoptIOError, UnsupportedError, UsageError
from memopt.runtime.text.template_limits import TemplateLimits

_WORKER = "memopt.runtime.text.template_worker"
# A template may put a whole message into its reason.
MAX_REASON_CHARACTERS = 300


class TemplateProcess:
    """One rendering at a time, from any thread. The process starts with the first and ends with `close`."""

    def __init__(self, limits: TemplateLimits | None = None) -> None:
        self._limits = limits or TemplateLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, template: str, variables: Mapping[str, Any], file: str) -> str:
        """The text of `template` with `variables` (plain JSON values).

        UsageError if the template refuses the conversation or fails on it, or it is too long; UnsupportedError if it
        takes more time than the limit; both name `file`, where the template stands. MemoptIOError if no process can be
        started.
        """
        request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        if len(request) > self._limits.max_request_bytes:
            raise UsageError(
                f"template and conversation take {len(request):,} bytes as JSON, at most"
                f" {self._limits.max_request_bytes:,} are rendered",
                file=file,
                remedy="shorten the conversation, or pass a plain prompt",
            )
        with self._lock:
            line = self._exchange(request, file)
        reply = json.loads(line)
        if "error" in reply:
            raise UsageError(
                f"the chat template refuses this conversation: {reply['error'][:MAX_REASON_CHARACTERS]}",
                file=file,
                remedy="check the messages' roles and contents, or pass a plain prompt",
            )
        return str(reply["text"])

    def _exchange(self, request: bytes, file: str) -> bytes:
        process = self._process or self._start()
        self._process = process
        if process.stdin is None or process.stdout is None:
            raise MemoptIOError("the process that renders chat templates has no pipes")
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:
            # Ctrl-C while it renders: its answer must not be taken for the next one's.
            self._end()
            raise
        if not line.endswith(b"\n"):
            code = self._end()
            if code == -signal.SIGALRM:
                raise UnsupportedError(
                    f"the chat template took more than {self._limits.seconds:g} s",
                    file=file,
                    remedy="pass a plain prompt",
                )
            raise MemoptIOError(f"the process that renders chat templates ended with {code}", file=file)
        return line

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self._limits
        arguments = [str(limits.seconds), str(limits.memory_bytes), str(limits.max_characters)]
        try:
            return subprocess.Popen(
                # -P: the folder that we happen to be in gives no modules.
                [sys.executable, "-P", "-m", _WORKER, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as problem:
            raise MemoptIOError(f"cannot start a process that renders chat templates: {problem.strerror}") from None

    def _end(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        if process.stdin is not None:
            with suppress(BrokenPipeError):
                process.stdin.close()
        try:
            code = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return code

    def close(self) -> None:
        """End the process; a later rendering starts another."""
        with self._lock:
            self._end()
