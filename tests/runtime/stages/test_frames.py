"""Frames: golden bytes, and no fault of a byte that is not found."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from memopt.errors import HandOverError
from memopt.runtime.stages.frames import (
    HEAD_BYTES,
    MAX_BODY_BYTES,
    FrameKind,
    PageSlice,
    checked_frame,
    number_body,
    parse_head,
    parse_number,
    parse_refusal,
    parse_slice,
    refusal_body,
    render_head,
    slice_head,
)


def read_frame(raw: bytes) -> tuple[FrameKind, bytes]:
    """What a receiver makes of the bytes of one frame."""
    head = parse_head(raw[:HEAD_BYTES])
    frame = checked_frame(head, raw[HEAD_BYTES : HEAD_BYTES + head.body_bytes])
    return frame.kind, bytes(frame.body)


def test_the_bytes_are_these() -> None:
    head = b"MOHO\x01\x04\x00\x00" + (8).to_bytes(8, "little")
    body = (5).to_bytes(8, "little")
    digest = hashlib.sha256(head + body).digest()
    assert render_head(FrameKind.TAKEN, [number_body(5)]) == head + digest
    assert read_frame(head + digest + body) == (FrameKind.TAKEN, body)


@given(st.sampled_from([FrameKind.OFFER, FrameKind.PAGES]), st.lists(st.binary(max_size=50), max_size=4))
def test_what_is_sent_is_received(kind: FrameKind, parts: list[bytes]) -> None:
    assert read_frame(render_head(kind, parts) + b"".join(parts)) == (kind, b"".join(parts))


@given(st.binary(max_size=100), st.integers(1, 255), st.data())
def test_every_flipped_byte_is_found(body: bytes, mask: int, data: st.DataObject) -> None:
    raw = bytearray(render_head(FrameKind.PAGES, [body]) + body)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= mask
    with pytest.raises(HandOverError):
        read_frame(bytes(raw))


@given(st.binary(min_size=1, max_size=100), st.data())
def test_a_cut_frame_is_found(body: bytes, data: st.DataObject) -> None:
    raw = render_head(FrameKind.PAGES, [body]) + body
    with pytest.raises(HandOverError):
        read_frame(raw[: data.draw(st.integers(0, len(raw) - 1))])


@pytest.mark.parametrize("kind", list(FrameKind))
def test_a_body_above_its_cap_is_neither_sent_nor_read(kind: FrameKind) -> None:
    claimed = b"MOHO\x01" + bytes([kind, 0, 0]) + (MAX_BODY_BYTES[kind] + 1).to_bytes(8, "little") + bytes(32)
    with refusal(HandOverError, kind.name):
        parse_head(claimed)
    if MAX_BODY_BYTES[kind] < 2**22:
        with refusal(HandOverError, kind.name):
            render_head(kind, [bytes(MAX_BODY_BYTES[kind] + 1)])


def test_bodies_are_read_back_and_short_ones_refused() -> None:
    def frame(kind: FrameKind, body: bytes) -> object:
        return checked_frame(parse_head(render_head(kind, [body])), body)

    assert parse_number(frame(FrameKind.PULL, number_body(2**63))) == 2**63  # type: ignore[arg-type]
    assert parse_refusal(frame(FrameKind.REFUSED, refusal_body(4, "größer"))) == (4, "größer")  # type: ignore[arg-type]
    part = PageSlice(number=4, layer=3, num_pages=2, first_page=1)
    found, rest = parse_slice(frame(FrameKind.PAGES, slice_head(part) + b"abc"))  # type: ignore[arg-type]
    assert (found, bytes(rest)) == (part, b"abc")
    assert slice_head(part).hex() == "040000000000000003000000020000000100000000000000"
    for parse, kind in (
        (parse_number, FrameKind.PULL),
        (parse_refusal, FrameKind.REFUSED),
        (parse_slice, FrameKind.PAGES),
    ):
        with refusal(HandOverError):
            parse(frame(kind, b"1234567"))  # type: ignore[operator]


def test_a_reason_of_any_length_fits() -> None:
    assert len(refusal_body(1, "ü" * 5000)) <= MAX_BODY_BYTES[FrameKind.REFUSED]
