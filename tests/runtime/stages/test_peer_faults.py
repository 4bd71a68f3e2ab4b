"""A peer that lies, stops or sends nonsense is cut off; the other end says so, and goes on without it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hand_over_cases import fill_pools, hand_over_of, mla_pools
from hypothesis import given, settings
from hypothesis import strategies as st
from page_transports import wait_for
from refusals import within_seconds

from memopt.errors import HandOverError, PeerError
from memopt.runtime.integrity.tracker import NoopTracker
from memopt.runtime.stages.frame_connection import FrameConnection
from memopt.runtime.stages.frames import (
    FrameKind,
    PageSlice,
    number_body,
    refusal_body,
    render_head,
    slice_head,
)
from memopt.runtime.stages.hand_over import render_hand_over
from memopt.runtime.stages.kv_geometry import geometry_of
from memopt.runtime.stages.page_slices import page_slices, slice_bytes, tokens_in
from memopt.runtime.stages.page_transport import Answer
from memopt.runtime.stages.page_transport_socket import SocketPageReceiver, SocketPageSender

SOURCE = mla_pools(8)
fill_pools(SOURCE)
HAND_OVER = hand_over_of(SOURCE, [3, 1], 100)


@pytest.fixture(autouse=True)
def _no_test_waits_for_ever() -> Iterator[None]:
    with within_seconds(60):
        yield


def frame(kind: FrameKind, *parts: bytes) -> bytes:
    return render_head(kind, parts) + b"".join(parts)


def page_frames(number: int = 1) -> list[bytes]:
    """The PAGES frames of HAND_OVER."""
    frames = []
    for part in page_slices(number, geometry_of(SOURCE), 2):
        data = slice_bytes(SOURCE.layers[part.layer], [3, 1], tokens_in(part, 100))
        frames.append(frame(FrameKind.PAGES, slice_head(part), *map(bytes, data)))
    return frames


def fetch_from(sent: bytes, timeout_seconds: float = 5.0, *, stays: bool = False) -> None:
    """What a receiver makes of an offer and then `sent`; the sender then closes, or stays silent."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**22)
    receiver = SocketPageReceiver(other, timeout_seconds=timeout_seconds)
    with one:
        one.settimeout(5)
        one.sendall(frame(FrameKind.OFFER, render_hand_over(HAND_OVER)))
        offer = wait_for(receiver.poll)
        one.sendall(sent)
        if not stays:
            one.shutdown(socket.SHUT_WR)
        try:
            receiver.fetch(offer.hand_over, mla_pools(4), [1, 2])
        finally:
            receiver.close()


def test_the_frames_of_this_file_are_good_ones() -> None:
    fetch_from(b"".join(page_frames()))
    # Late pages of an earlier offer are passed over.
    fetch_from(page_frames(0)[0] + b"".join(page_frames()))


def swapped(frames: list[bytes]) -> bytes:
    return b"".join(reversed(frames))


@pytest.mark.parametrize(
    "bend",
    [
        lambda frames: b"",
        lambda frames: frames[0],
        lambda frames: b"".join(frames)[:-1],
        lambda frames: frames[0][:20],
        swapped,
        lambda frames: frames[0] * 2,
        lambda frames: b"".join(frames)[:-1] + b"\xff",
        lambda frames: frame(FrameKind.PAGES, slice_head(PageSlice(1, 0, 2, 0))),
        lambda frames: frame(FrameKind.PAGES, slice_head(PageSlice(1, 0, 2**31, 0)), bytes(100)),
        lambda frames: frame(FrameKind.PAGES, slice_head(PageSlice(2, 0, 2, 0)), bytes(100)),
        lambda frames: frame(FrameKind.PAGES, b"short"),
        lambda frames: frame(FrameKind.TAKEN, number_body(1)),
        lambda frames: frame(FrameKind.REGION, b"{}"),
        lambda frames: frame(FrameKind.CANCEL, number_body(1)) + b"".join(frames),
        lambda frames: frame(FrameKind.OFFER, b"{}"),
        lambda frames: frame(FrameKind.OFFER, render_hand_over(HAND_OVER)),
        lambda frames: b"MOHO\x01\x03\x00\x00" + b"\xff" * 40,
        lambda frames: b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100),
    ],
)
def test_pages_that_are_not_what_was_offered_are_not_taken(bend: Callable[[list[bytes]], bytes]) -> None:
    with pytest.raises((HandOverError, PeerError)):
        fetch_from(bend(page_frames()))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_no_flipped_byte_of_a_transfer_is_taken(data: st.DataObject) -> None:
    sent = bytearray(b"".join(page_frames()))
    sent[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((HandOverError, PeerError)):
        fetch_from(bytes(sent))


@pytest.mark.parametrize("sent", [b"", b"MOHO", page_frames()[0], page_frames()[0][:5000]])
def test_a_sender_that_goes_silent_is_left(sent: bytes) -> None:
    started = time.monotonic()
    with pytest.raises((HandOverError, PeerError)):
        fetch_from(sent, timeout_seconds=0.2, stays=True)
    assert time.monotonic() - started < 5


def test_an_offer_out_of_form_ends_the_transport() -> None:
    for sent in (frame(FrameKind.OFFER, b"{}"), b"x" * 100, frame(FrameKind.PULL, number_body(1))):
        one, other = socket.socketpair()
        receiver = SocketPageReceiver(other)
        one.sendall(sent)
        with pytest.raises(PeerError):
            wait_for(receiver.poll)
        # The peer hears of it.
        assert one.recv(1) == b""
        one.close()
        receiver.close()


def new_sender(timeout_seconds: float = 1.0) -> tuple[SocketPageSender, FrameConnection]:
    one, other = socket.socketpair()
    return SocketPageSender(one, SOURCE, NoopTracker(), timeout_seconds=timeout_seconds), FrameConnection(other)


def test_answers_may_come_twice_but_count_once() -> None:
    sender, peer = new_sender()
    sender.offer(HAND_OVER)
    for _ in range(3):
        peer.send(FrameKind.TAKEN, number_body(1))
        peer.send(FrameKind.REFUSED, refusal_body(1, "too late"))
        peer.send(FrameKind.PULL, number_body(1))
    assert wait_for(sender.poll) == Answer(1, is_taken=True)
    assert sender.poll() == []
    assert peer.receive(1) is not None
    # Nothing is read for an offer that has its answer: its pages may be somebody else's.
    assert peer.receive(0.1) is None
    sender.close()
    peer.close()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameKind.TAKEN, number_body(2)),
        (FrameKind.TAKEN, number_body(0)),
        (FrameKind.PULL, number_body(2)),
        (FrameKind.REFUSED, refusal_body(7, "what?")),
        (FrameKind.TAKEN, b"1"),
        (FrameKind.OFFER, b"{}"),
        (FrameKind.CANCEL, number_body(1)),
    ],
)
def test_a_receiver_that_breaks_the_format_is_cut_off(kind: FrameKind, body: bytes) -> None:
    sender, peer = new_sender()
    sender.offer(HAND_OVER)
    assert peer.receive(5) is not None
    peer.send(kind, body)
    with pytest.raises(PeerError):
        wait_for(sender.poll)
    with pytest.raises(PeerError):
        peer.receive(5)
    sender.close()
    peer.close()


def offer_too_much(sender: SocketPageSender) -> None:
    """Offers of some megabytes, which nobody reads."""
    for number in range(1, 30):
        sender.offer(hand_over_of(SOURCE, list(range(1, 400)), 64 * 399, number=number))


def test_a_receiver_that_does_not_read_is_left_in_time() -> None:
    """Offers pile up behind a full socket: the engine's thread never waits, and the transport ends."""
    sender, peer = new_sender()
    started = time.monotonic()
    offer_too_much(sender)
    assert time.monotonic() - started < 5
    with pytest.raises(PeerError, match="silent"):
        wait_for(sender.poll)
    sender.close()
    peer.close()


def test_close_does_not_wait_for_a_receiver_that_does_not_read() -> None:
    sender, peer = new_sender(timeout_seconds=600.0)
    offer_too_much(sender)
    time.sleep(0.1)
    started = time.monotonic()
    sender.close()
    assert time.monotonic() - started < 5
    peer.close()


def test_a_slow_receiver_gets_its_pages_all_the_same() -> None:
    one, other = socket.socketpair()
    sender = SocketPageSender(one, SOURCE, NoopTracker(), timeout_seconds=5.0)
    sender.offer(HAND_OVER)
    with other:
        other.sendall(frame(FrameKind.PULL, number_body(1)))
        expected = frame(FrameKind.OFFER, render_hand_over(HAND_OVER)) + b"".join(page_frames())
        received = bytearray()
        while len(received) < len(expected):
            received += other.recv(4096)
            time.sleep(0.0005)
        assert bytes(received) == expected
        other.sendall(frame(FrameKind.TAKEN, number_body(1)))
        assert wait_for(sender.poll) == Answer(1, is_taken=True)
    sender.close()
