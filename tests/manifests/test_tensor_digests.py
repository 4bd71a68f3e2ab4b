"""The ledger's digests are compared with the bytes that are signed."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import TINY_GLM5

import memopt
from memopt.errors import ContentError
from memopt.manifests.keys import generate_private_key
from memopt.manifests.sign import sign_release
from memopt.manifests.signer import KeySigner
from memopt.manifests.tensor_digests import TensorDigests, TensorSpan


@given(
    data=st.binary(max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    step=st.integers(1, 50),
    bad=st.integers(0, 199),
)
def test_any_cut_and_any_reading_step_finds_the_changed_tensor(
    data: bytes, cuts: list[int], step: int, bad: int
) -> None:
    places = sorted({0, len(data), *(cut for cut in cuts if cut <= len(data))})
    spans = [
        TensorSpan(f"t{start}", start, end, hashlib.sha256(data[start:end]).hexdigest())
        for start, end in pairwise(places)
    ]

    def feed(raw: bytes) -> None:
        digests = TensorDigests("file", spans)
        for offset in range(0, len(raw), step):
            digests.update(memoryview(raw)[offset : offset + step], offset)

    feed(data)
    if bad < len(data):
        changed = data[:bad] + bytes([data[bad] ^ 1]) + data[bad + 1 :]
        (hit,) = [span for span in spans if span.start <= bad < span.end]
        with pytest.raises(ContentError) as caught:
            feed(changed)
        assert caught.value.tensor == hit.name


def test_a_release_whose_bytes_are_not_the_ledgers_is_not_signed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    memopt.compress(TINY_GLM5, out, recipe="copy", options=memopt.PlanOptions(max_file_bytes=4_000_000))
    file = sorted(out.glob("*.safetensors"))[1]
    with open(file, "r+b") as stream:
        stream.seek(-100, 2)
        byte = stream.read(1)[0]
        stream.seek(-100, 2)
        stream.write(bytes([byte ^ 1]))
    with pytest.raises(ContentError, match=r"not those that ledger\.jsonl names") as caught:
        sign_release(out, [KeySigner(generate_private_key())])
    assert caught.value.file == file.name
    assert caught.value.tensor is not None
    assert not (out / "model.sig").exists()
