"""What travels between two stages: frames of a fixed head and a body, both under one digest.

    offset  size  field (little-endian)
    0       4     b"MOHO"
    4       1     version, 1
    5       1     kind
    6       2     zero
    8       8     bytes of the body
    16      32    SHA-256 of the 16 bytes before and the body
    48      n     body

The digest finds faults of memory and network; whoever can open the connection is trusted not to forge.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from memopt.errors import HandOverError
from memopt.runtime.stages.hand_over import MAX_HAND_OVER_BYTES

MAGIC = b"MOHO"
FRAME_VERSION = 1
# What a PAGES frame aims at; one page of one layer goes into one frame, whatever its size.
PAGES_BODY_BYTES = 8 * 2**20
MAX_REASON_BYTES = 2048
_HEAD = struct.Struct("<4sBBHQ")
_DIGEST_BYTES = 32
HEAD_BYTES = _HEAD.size + _DIGEST_BYTES
_NUMBER = struct.Struct("<Q")
_SLICE = struct.Struct("<QIIQ")

Bytes: TypeAlias = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """The sender's OFFER, PAGES, CANCEL and REGION; the receiver's PULL, and TAKEN or REFUSED, its one answer."""

    OFFER = 1
    PULL = 2
    PAGES = 3
    TAKEN = 4
    REFUSED = 5
    CANCEL = 6
    REGION = 7


MAX_BODY_BYTES = {
    FrameKind.OFFER: MAX_HAND_OVER_BYTES,
    FrameKind.PULL: _NUMBER.size,
    FrameKind.PAGES: 64 * 2**20,
    FrameKind.TAKEN: _NUMBER.size,
    FrameKind.REFUSED: _NUMBER.size + MAX_REASON_BYTES,
    FrameKind.CANCEL: _NUMBER.size,
    FrameKind.REGION: 2**20,
}


@dataclass(frozen=True, slots=True)
class FrameHead:
    """A head whose fields are sound; `raw`: the bytes that the digest covers."""

    kind: FrameKind
    body_bytes: int
    digest: bytes
    raw: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose digest was checked."""

    kind: FrameKind
    body: bytes | bytearray


@dataclass(frozen=True, slots=True)
class PageSlice:
    """Which pages a PAGES frame holds: `num_pages` of one layer, the first being page `first_page` of the sequence."""

    number: int
    layer: int
    num_pages: int
    first_page: int


def render_head(kind: FrameKind, parts: Sequence[Bytes]) -> bytes:
    """The head of a frame whose body is `parts` one after the other. HandOverError for a body above its kind's cap."""
    body_bytes = sum(len(memoryview(part).cast("B")) for part in parts)
    if body_bytes > MAX_BODY_BYTES[kind]:
        raise HandOverError(f"a {kind.name} frame of {body_bytes:,} bytes; at most {MAX_BODY_BYTES[kind]:,} are sent")
    raw = _HEAD.pack(MAGIC, FRAME_VERSION, kind, 0, body_bytes)
    return raw + _digest(raw, parts)


def parse_head(raw: bytes) -> FrameHead:
    """The head in HEAD_BYTES bytes. HandOverError for another format, kind or size: nothing after it can be read."""
    if len(raw) != HEAD_BYTES:
        raise HandOverError(f"a frame's head has {HEAD_BYTES} bytes, not {len(raw)}")
    magic, version, kind, zero, body_bytes = _HEAD.unpack_from(raw)
    if magic != MAGIC or version != FRAME_VERSION or zero:
        raise HandOverError(
            f"a frame starts with {raw[:8].hex()}, not with version {FRAME_VERSION} of ours",
            remedy="both stages must run the same memopt",
        )
    if kind not in MAX_BODY_BYTES:
        raise HandOverError(f"a frame of the unknown kind {kind}", remedy="both stages must run the same memopt")
    known = FrameKind(kind)
    if body_bytes > MAX_BODY_BYTES[known]:
        raise HandOverError(f"a {known.name} frame of {body_bytes:,} bytes; at most {MAX_BODY_BYTES[known]:,} are read")
    return FrameHead(known, body_bytes, raw[_HEAD.size :], raw[: _HEAD.size])


def checked_frame(head: FrameHead, body: bytes | bytearray) -> Frame:
    """The frame. HandOverError when the body is not what the digest in `head` covers."""
    if len(body) != head.body_bytes or _digest(head.raw, (body,)) != head.digest:
        raise HandOverError(
            f"a {head.kind.name} frame of {head.body_bytes:,} bytes differs from its digest",
            remedy="check memory and network",
        )
    return Frame(head.kind, body)


def number_body(number: int) -> bytes:
    """The body of PULL, TAKEN and CANCEL: the number of a hand-over."""
    return _NUMBER.pack(number)


def parse_number(frame: Frame) -> int:
    """The number in such a body. HandOverError for another size."""
    if len(frame.body) != _NUMBER.size:
        raise HandOverError(f"a {frame.kind.name} frame of {len(frame.body)} bytes, not {_NUMBER.size}")
    return int(_NUMBER.unpack(frame.body)[0])


def refusal_body(number: int, reason: str) -> bytes:
    """The body of REFUSED: a number, and why, cut to MAX_REASON_BYTES."""
    return _NUMBER.pack(number) + reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]


def parse_refusal(frame: Frame) -> tuple[int, str]:
    """Number and reason of a REFUSED frame. HandOverError if it is shorter than a number."""
    if len(frame.body) < _NUMBER.size:
        raise HandOverError(f"a REFUSED frame of {len(frame.body)} bytes")
    return int(_NUMBER.unpack_from(frame.body)[0]), frame.body[_NUMBER.size :].decode("utf-8", "replace")


def slice_head(part: PageSlice) -> bytes:
    """The start of a PAGES body, before the pages: <Q number, I layer, I num_pages, Q first_page."""
    return _SLICE.pack(part.number, part.layer, part.num_pages, part.first_page)


def parse_slice(frame: Frame) -> tuple[PageSlice, memoryview]:
    """Which pages a PAGES frame holds, and their bytes. HandOverError if it is shorter than its own head."""
    if len(frame.body) < _SLICE.size:
        raise HandOverError(f"a PAGES frame of {len(frame.body)} bytes")
    return PageSlice(*_SLICE.unpack_from(frame.body)), memoryview(frame.body)[_SLICE.size :]


def _digest(head: bytes, parts: Sequence[Bytes]) -> bytes:
    digest = hashlib.sha256(head)
    for part in parts:
        digest.update(part)
    return digest.digest()
