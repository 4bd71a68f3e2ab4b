"""The header of a hand-over: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hand_over_cases import hand_over_of, mla_pools
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from memopt.errors import HandOverError, UsageError
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.stages import hand_over as module
from memopt.runtime.stages.hand_over import parse_hand_over, render_hand_over

SAMPLE = hand_over_of(mla_pools(8), [3, 5, 4], 150, number=9, tags=[2**62, 1, 77])
GOLDEN = (
    b'{"version":1,"number":2,"request_id":"request 2","tenant":"","token_ids":[0,1],"first_token":7,"num_tokens":2,'
    b'"sampling":{"max_tokens":5,"temperature":0.5,"top_p":0.9,"seed":3,"stop":["ende","fin"],"ignore_eos":false},'
    b'"model":{"source":"' + b"ab" * 32 + b'","config":"' + b"cd" * 32 + b'"},'
    b'"geometry":{"page_tokens":64,"layers":["mla+indexer","mla"]},"pages":[[3,0]]}'
)


def test_the_bytes_are_these() -> None:
    assert render_hand_over(hand_over_of(mla_pools(8), [3], 2, number=2)) == GOLDEN


@given(
    number=st.integers(1, 2**63 - 1),
    name=st.text(max_size=50),
    num_tokens=st.integers(1, 300),
    temperature=st.floats(0, 10, allow_nan=False),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
)
def test_what_is_written_is_read_back(
    number: int, name: str, num_tokens: int, temperature: float, stop: list[str]
) -> None:
    params = SamplingParams(max_tokens=8, temperature=temperature, stop=tuple(stop), ignore_eos=True)
    pages = list(range(1, 2 + (num_tokens - 1) // 64))
    wanted = replace(hand_over_of(mla_pools(2), pages, num_tokens, number=number), request_id=name, params=params)
    try:
        raw = render_hand_over(wanted)
        assert parse_hand_over(raw) == wanted
    except HandOverError:
        # Half a character: neither printed nor logged, so refused.
        assert any(0xD800 <= ord(letter) < 0xE000 for letter in name + "".join(stop))


def changed(path: str, value: Any) -> bytes:
    """SAMPLE's JSON with one field replaced, or removed for None."""
    table = json.loads(render_hand_over(SAMPLE))
    part = table
    *folders, last = path.split(".")
    for name in folders:
        part = part[name]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return json.dumps(table).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 2), ("version", None), ("number", 0), ("number", 2**63), ("number", "1"), ("number", True),
        ("request_id", "x" * 300), ("request_id", 5), ("tenant", None), ("token_ids", []), ("token_ids", [1, -1]),
        ("token_ids", [1.5] * 150), ("token_ids", "150"), ("num_tokens", 149), ("first_token", -1),
        ("first_token", 1.0), ("sampling.max_tokens", 0), ("sampling.temperature", -1.0), ("sampling.top_p", 0.0),
        ("sampling.seed", -1), ("sampling.stop", [""]), ("sampling.stop", ["a"] * 100), ("sampling.more", 1),
        ("sampling", None), ("model.source", "ab"), ("model.source", "AB" * 32), ("model.config", None),
        ("geometry.layers", []), ("geometry.layers", ["mla", "gqa"]), ("geometry.layers", ["gqa:0x64"]),
        ("geometry.layers", ["mla"] * 5000), ("geometry.page_tokens", -1), ("pages", [[1, 2]]),
        ("pages", [[1, 2, 3]] * 3), ("pages", [[1]] * 3), ("pages", [[-1, 2]] * 3), ("pages", [[1, 2**63]] * 3),
        ("extra", 1),
    ],
)  # fmt: skip
def test_a_field_out_of_form_is_refused(path: str, value: Any) -> None:
    with refusal(HandOverError):
        parse_hand_over(changed(path, value))


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"[]", b"null", b"\xff", GOLDEN[:-1], GOLDEN + b"x", GOLDEN.replace(b'"number"', b'"version"', 1)],
)
def test_other_bytes_are_refused(raw: bytes) -> None:
    with refusal(HandOverError):
        parse_hand_over(raw)


@given(st.data())
def test_no_bytes_do_worse_than_a_refusal(data: st.DataObject) -> None:
    raw = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 4))):
        action: Callable[[bytearray, int], None] = data.draw(
            st.sampled_from([lambda b, i: b.__setitem__(i, b[i] ^ 0x11), lambda b, i: b.__delitem__(i)])
        )
        action(raw, data.draw(st.integers(0, len(raw) - 1)))
    # Any other exception fails the test.
    with suppress(HandOverError):
        parse_hand_over(bytes(raw))


def test_sizes_are_capped_before_anything_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HAND_OVER_BYTES", 100)
    with refusal(HandOverError, "100"):
        parse_hand_over(GOLDEN)
    with refusal(UsageError, "too many"):
        render_hand_over(SAMPLE)
