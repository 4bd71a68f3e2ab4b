"""Where two stages meet: on this machine only, and a Unix socket only for its owner."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from refusals import refusal

from memopt.errors import MemoptIOError, PeerError, UsageError
from memopt.runtime.stages import stage_socket
from memopt.runtime.stages.stage_socket import accept, connect, listen


def meet(address: str, listener: socket.socket) -> None:
    one = connect(address, timeout_seconds=5)
    other = accept(listener, timeout_seconds=5)
    one.sendall(b"hello")
    assert other.recv(5) == b"hello"
    for end in (one, other, listener):
        end.close()


def test_stages_meet_over_a_unix_socket_of_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    before = os.umask(0o022)
    os.umask(before)
    listener = listen(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    after = os.umask(before)
    assert after == before
    with refusal(MemoptIOError, str(path)):
        listen(f"unix:{path}")
    meet(f"unix:{path}", listener)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_stages_meet_over_loopback(host: str) -> None:
    listener = listen(f"tcp:{host}:0")
    port = listener.getsockname()[1]
    meet(f"tcp:{host}:{port}", listener)


@pytest.mark.parametrize(
    "address",
    ["", "unix:", "tcp:", "tcp:127.0.0.1", "tcp:127.0.0.1:", "tcp:127.0.0.1:x", "tcp:127.0.0.1:65536",
     "udp:127.0.0.1:1", "tcp:localhost:80", "tcp:0.0.0.0:80", "tcp:10.1.2.3:80", "tcp:[::]:80", "tcp::80"],
)  # fmt: skip
def test_other_addresses_are_refused(address: str) -> None:
    for function in (listen, connect):
        with refusal(UsageError):
            function(address)


def test_a_stage_that_does_not_come_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with listen(f"unix:{tmp_path / 'kv.sock'}") as listener, refusal(PeerError, "0.05 s"):
        accept(listener, timeout_seconds=0.05)
    with refusal(PeerError, "start the other stage first"):
        connect(f"unix:{tmp_path / 'nobody.sock'}", timeout_seconds=1)


def test_another_users_stage_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"unix:{tmp_path / 'kv.sock'}"
    with listen(address) as listener, connect(address) as one:
        monkeypatch.setattr(stage_socket.os, "geteuid", lambda: 12345)
        with refusal(PeerError, "12345"):
            accept(listener, timeout_seconds=5)
        assert one.recv(1) == b""
        with refusal(PeerError, "12345"):
            connect(address, timeout_seconds=5)


def test_an_address_is_free_again_once_the_stages_have_met(tmp_path: Path) -> None:
    """Else its file would stand in the way of the next start; and a second receiver would wait in vain."""
    address = f"unix:{tmp_path / 'kv.sock'}"
    for _ in range(2):
        meet(address, listen(address))
        assert list(tmp_path.iterdir()) == []
    with listen(address) as listener, connect(address) as one:
        accept(listener, timeout_seconds=5).close()
        with refusal(PeerError, "start the other stage first"):
            connect(address, timeout_seconds=5)
        assert one.recv(1) == b""
