"""Frames over a connected socket, with time limits: a peer that ends, goes silent or breaks the format is cut off."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import NoReturn, TypeVar

from memopt.errors import HandOverError, PeerError
from memopt.runtime.stages.frames import HEAD_BYTES, Bytes, Frame, FrameKind, checked_frame, parse_head, render_head

_MS = 1000
_Result = TypeVar("_Result")


class FrameConnection:
    """A stream socket, Unix or TCP. One thread may send while another receives.

    Once a frame has begun, `timeout_seconds` is the longest silence before its end, and the longest that sending it may
    take. After a PeerError or HandOverError nothing is sent or received any more: every call raises PeerError.
    """

    def __init__(self, connected: socket.socket, *, timeout_seconds: float = 60.0) -> None:
        self._socket = connected
        self._timeout_seconds = timeout_seconds
        self._failure: str | None = None
        connected.settimeout(timeout_seconds)
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: FrameKind, *parts: Bytes, file_descriptor: int | None = None) -> None:
        """Send one frame, over a Unix socket with a file descriptor if asked. PeerError if the peer does not read."""
        head = render_head(kind, parts)

        def send_all() -> None:
            if file_descriptor is None:
                self._socket.sendall(head)
            else:
                sent = socket.send_fds(self._socket, [head], [file_descriptor])
                self._socket.sendall(head[sent:])
            for part in parts:
                self._socket.sendall(part)

        self._attempt(send_all)

    def receive(self, wait_seconds: float | None = None) -> Frame | None:
        """The next frame; None when none begins within `wait_seconds` (None: as long as it takes).

        Raises PeerError when the peer has closed, HandOverError for a frame out of form.
        """
        return self._attempt(lambda: self._receive(self._receive_into) if self._is_readable(wait_seconds) else None)

    def receive_with_descriptor(self) -> tuple[Frame, int]:
        """The next frame and the file descriptor that came with it, which is the caller's to close. Unix sockets only.

        Raises as `receive`, and HandOverError when no descriptor came.
        """
        descriptors: list[int] = []

        def fill(buffer: memoryview) -> int:
            if descriptors:
                return self._receive_into(buffer)
            raw, found, _, _ = socket.recv_fds(self._socket, len(buffer), 1)
            buffer[: len(raw)] = raw
            descriptors.extend(found)
            if raw and not found:
                raise HandOverError("the first frame brought no file descriptor", remedy="connect over a Unix socket")
            return len(raw)

        try:
            # A socket's own timeout covers the wait for the first byte.
            return self._attempt(lambda: self._receive(fill)), descriptors[0]
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def is_alive(self) -> bool:
        """Whether the peer has not closed its end, whatever still waits to be read; False once this end is closed."""
        watch = select.poll()
        watch.register(self._socket, select.POLLRDHUP)
        return self._failure is None and not watch.poll(0)

    def shut_down(self) -> None:
        """End both directions: whoever waits in `send` or `receive`, here or at the peer, gets a PeerError."""
        self._end("the connection was closed here")

    def close(self) -> None:
        """`shut_down`, and give the socket back; no thread may be in a call of this connection any more."""
        self.shut_down()
        self._socket.close()

    def _receive(self, fill: Callable[[memoryview], int]) -> Frame:
        head = parse_head(bytes(self._exactly(HEAD_BYTES, fill)))
        return checked_frame(head, self._exactly(head.body_bytes, self._receive_into))

    def _exactly(self, num_bytes: int, fill: Callable[[memoryview], int]) -> bytearray:
        buffer = bytearray(num_bytes)
        view, start = memoryview(buffer), 0
        while start < num_bytes:
            received = fill(view[start:])
            if received == 0:
                raise PeerError(
                    "the other stage closed the connection" + (" in the middle of a frame" if start else "")
                )
            start += received
        return buffer

    def _receive_into(self, buffer: memoryview) -> int:
        return self._socket.recv_into(buffer)

    def _is_readable(self, wait_seconds: float | None) -> bool:
        # select() cannot watch descriptors above 1023.
        watch = select.poll()
        watch.register(self._socket, select.POLLIN)
        return bool(watch.poll(None if wait_seconds is None else wait_seconds * _MS))

    def _attempt(self, action: Callable[[], _Result]) -> _Result:
        if self._failure is not None:
            self._refuse()
        try:
            return action()
        except HandOverError as problem:
            self._end(problem.message)
            raise
        except TimeoutError:
            self._end(f"it was silent in the middle of a frame for {self._timeout_seconds:g} s")
        except PeerError as problem:
            self._end(problem.message)
        except OSError as problem:
            self._end(problem.strerror or str(problem))
        self._refuse()

    def _end(self, reason: str) -> None:
        if self._failure is None:
            self._failure = reason
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The peer was first.
            return

    def _refuse(self) -> NoReturn:
        raise PeerError(f"the other stage cannot be reached: {self._failure}", remedy="connect the stages again")
