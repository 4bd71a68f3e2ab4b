"""memopt.chunks: order, exact size, and every run of digests under its signed root."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal
from tiny_releases import THREE_CHUNKS, signed_release

from memopt.errors import ManifestError
from memopt.manifests.chunk_file import chunks_size_bytes, covered_files, parse_chunks, render_chunks
from memopt.manifests.digest import CHUNK_SIZE_BYTES, num_chunks
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME
from memopt.manifests.manifest import Manifest, parse_manifest
from memopt.manifests.sign import digest_of


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_release(tmp_path_factory.mktemp("chunks") / "release", rows=THREE_CHUNKS)


@pytest.fixture(scope="module")
def manifest(release: Path) -> Manifest:
    return parse_manifest((release / MANIFEST_NAME).read_bytes())


def test_every_file_has_the_digests_of_its_chunks(release: Path, manifest: Manifest) -> None:
    raw = (release / CHUNKS_NAME).read_bytes()
    leaves = parse_chunks(raw, manifest)
    assert len(raw) == chunks_size_bytes(manifest)
    names = [file.path for file in covered_files(manifest)]
    assert names == sorted(names)
    assert CHUNKS_NAME not in names
    expected = {name: digest_of((release / name).read_bytes()).leaves for name in names}
    assert {name: leaves.of(name) for name in names} == expected
    assert max(len(packed) for packed in expected.values()) == 3 * 32
    assert render_chunks(reversed(expected.items())) == raw
    with pytest.raises(KeyError):
        leaves.of(CHUNKS_NAME)


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + bytes(32), lambda raw: b""])
def test_another_size_is_refused(release: Path, manifest: Manifest, change: object) -> None:
    raw = (release / CHUNKS_NAME).read_bytes()
    with refusal(ManifestError, CHUNKS_NAME, "bytes"):
        parse_chunks(change(raw), manifest)  # type: ignore[operator]


@given(data=st.data())
def test_any_changed_byte_is_refused(release: Path, manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray((release / CHUNKS_NAME).read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with refusal(ManifestError, CHUNKS_NAME, "chunk root"):
        parse_chunks(bytes(raw), manifest)


def test_two_digests_swapped_are_refused(release: Path, manifest: Manifest) -> None:
    raw = (release / CHUNKS_NAME).read_bytes()
    leaves = parse_chunks(raw, manifest)
    start, _ = next(span for span in leaves.ranges.values() if span[1] - span[0] > 64)
    swapped = raw[:start] + raw[start + 32 : start + 64] + raw[start : start + 32] + raw[start + 64 :]
    with refusal(ManifestError, "chunk root"):
        parse_chunks(swapped, manifest)


@pytest.mark.parametrize(
    ("size", "count"), [(0, 0), (1, 1), (CHUNK_SIZE_BYTES, 1), (CHUNK_SIZE_BYTES + 1, 2), (500 * 10**9, 119210)]
)
def test_number_of_chunks(size: int, count: int) -> None:
    assert num_chunks(size) == count
