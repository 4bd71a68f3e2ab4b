"""Any one byte of any file of a signed release changed: refused, never exit 0, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli.invoke import invoke
from hypothesis import given, settings
from hypothesis import strategies as st
from release_files import contents
from tiny_releases import KEY, POLICY, signed_release

from memopt.errors import ExitCode, MemoptError
from memopt.manifests.release import open_release
from memopt.manifests.verify import verify_release

REFUSALS = {int(code) for code in ExitCode} - {
    0,
    int(ExitCode.INTERNAL),
    int(ExitCode.USAGE),
    int(ExitCode.INTERRUPTED),
}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return signed_release(tmp_path_factory.mktemp("release") / "release")


@pytest.fixture(scope="module")
def public_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key.pub"
    path.write_bytes(KEY.public_key.pem)
    return path


@contextmanager
def changed(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def is_same_json(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def load_code(folder: Path) -> int:
    try:
        with open_release(folder, policy=POLICY) as opened:
            return 0 if opened.load() else 1
    except MemoptError as problem:
        return int(problem.exit_code)


def codes(folder: Path, public_key: Path) -> set[int]:
    """The exit codes of command, API and loader."""
    outcome = invoke("verify", folder, "--key", public_key)
    assert "Traceback" not in outcome.stderr
    assert "verified" not in outcome.stdout or outcome.code == 0
    return {outcome.code, verify_release(folder, POLICY).exit_code, load_code(folder)}


def test_unchanged_it_is_accepted(release: Path, public_key: Path) -> None:
    assert codes(release, public_key) == {0}


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_flipped_bits_of_one_byte(release: Path, public_key: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(contents(release))))
    path = release / name
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with changed(path, bytes(content)):
        found = codes(release, public_key)
    assert len(found) == 1
    assert found <= REFUSALS


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_cut_or_insertion(release: Path, public_key: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(contents(release))))
    path = release / name
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    new = content[:start] + data.draw(st.binary(max_size=8)) + content[end:]
    if new == content:
        return
    if name == "model.sig" and is_same_json(content, new):
        return  # white space between tokens: the same bundle
    with changed(path, new):
        found = codes(release, public_key)
    assert len(found) == 1
    assert found <= REFUSALS


@pytest.mark.slow
def test_every_byte_of_the_signature(release: Path) -> None:
    """Exhaustive for the one file whose bytes no digest covers: bits of every byte, API only."""
    path = release / "model.sig"
    content = path.read_bytes()
    for position in range(len(content)):
        for mask in (1, 0x20, 0x80):
            bent = bytearray(content)
            bent[position] ^= mask
            with changed(path, bytes(bent)):
                assert verify_release(release, POLICY).exit_code in REFUSALS, (position, mask)


def test_nothing_is_kept_between_two_calls(release: Path, public_key: Path, tmp_path: Path) -> None:
    """A good release, then a bad one, then the good one: each answer is that of a fresh process."""
    bad = shutil.copytree(release, tmp_path / "bad")
    (bad / "skip.py").write_text("import os")
    ignored = shutil.copytree(release, tmp_path / "ignored")
    (ignored / "config.json").write_bytes(b"{}" + b" " * 100)
    for folder, code in ((release, 0), (bad, 6), (release, 0), (ignored, 4), (bad, 6), (release, 0)):
        assert codes(folder, public_key) == {code}
    first, second = verify_release(bad, POLICY), verify_release(bad, POLICY)
    assert first.findings == second.findings
    assert (first.num_verified_files, first.verified_bytes) == (second.num_verified_files, second.verified_bytes)
