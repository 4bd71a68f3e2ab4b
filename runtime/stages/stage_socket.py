"""The socket between two stages of one machine: "unix:/run/memopt/kv.sock" or "tcp:127.0.0.1:7070".

Whoever can connect is trusted with what every request said. So a Unix socket is its owner's alone, and TCP stays on the
loopback interface, where every user of the machine can connect: use it only where there is but one.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from memopt.errors import MemoptIOError, PeerError, UsageError

_MAX_PORT = 2**16 - 1
# struct ucred of unix(7): process, user, group.
_CREDENTIALS = struct.Struct("3i")
_umask_lock = threading.Lock()
_Result = TypeVar("_Result")


def listen(address: str) -> socket.socket:
    """A listening socket. UsageError for an address that is neither form, MemoptIOError when it is taken."""
    family, place = _parsed(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_UNIX:
            # The mask is the whole process's, but no other way leaves no moment in which others could connect.
            with _umask_lock:
                old_mask = os.umask(0o177)
                try:
                    _attempt(address, lambda: listener.bind(place))
                finally:
                    os.umask(old_mask)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _attempt(address, lambda: listener.bind(place))
        _attempt(address, lambda: listener.listen(1))
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: socket.socket, *, timeout_seconds: float = 60.0) -> socket.socket:
    """The next stage that connects; a Unix socket's file, which nobody needs any more, is then removed.

    PeerError when none comes in time, or over a Unix socket one of another user.
    """
    listener.settimeout(timeout_seconds)
    try:
        connected, _ = listener.accept()
    except TimeoutError:
        raise PeerError(f"no stage connected within {timeout_seconds:g} s", remedy="start the other stage") from None
    _require_same_user(connected)
    if connected.family == socket.AF_UNIX:
        with suppress(FileNotFoundError):
            os.unlink(listener.getsockname())
    return connected


def connect(address: str, *, timeout_seconds: float = 60.0) -> socket.socket:
    """Connect to a stage that listens. UsageError for an address that is neither form.

    PeerError when nobody does, or over a Unix socket another user.
    """
    family, place = _parsed(address)
    connected = socket.socket(family, socket.SOCK_STREAM)
    connected.settimeout(timeout_seconds)
    try:
        connected.connect(place)
    except OSError as problem:
        connected.close()
        raise PeerError(f"{address}: {problem.strerror or problem}", remedy="start the other stage first") from None
    _require_same_user(connected)
    return connected


def _require_same_user(connected: socket.socket) -> None:
    if connected.family == socket.AF_UNIX:
        raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(raw)
        if user != os.geteuid():
            connected.close()
            raise PeerError(f"the other stage is user {user}'s, we are {os.geteuid()}", remedy="run both as one user")


def _parsed(address: str) -> tuple[int, str | tuple[str, int]]:
    kind, _, place = address.partition(":")
    if kind == "unix" and place:
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    if kind == "tcp" and port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= _MAX_PORT:
        try:
            number = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise UsageError(f"{host!r} is no IP address", remedy='use "tcp:127.0.0.1:PORT"') from None
        if not number.is_loopback:
            raise UsageError(
                f"{host} is reachable from outside, and this connection is neither encrypted nor authenticated",
                remedy="run both stages on one machine, or tunnel to its loopback address",
            )
        return (socket.AF_INET if number.version == 4 else socket.AF_INET6), (str(number), int(port))
    raise UsageError(f"the address is {address!r}", remedy='use "unix:PATH" or "tcp:127.0.0.1:PORT"')


def _attempt(address: str, action: Callable[[], _Result]) -> _Result:
    try:
        return action()
    except OSError as problem:
        raise MemoptIOError(
            f"{address}: {problem.strerror}",
            remedy="choose another address, or remove the file of a stage that was killed",
        ) from None
