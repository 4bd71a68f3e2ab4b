"""Signing: same inputs same bytes, other tools accept it, and a tree that no verifier would accept is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refusal
from signing_keys import fixed_key
from tiny_releases import CREATED, IDENTITY, KEY, NOW, POLICY, SHARDS, THREE_CHUNKS, sign, write_index, write_release

from memopt.errors import (
    ConfigError,
    ContentError,
    FileNameError,
    HeaderError,
    IndexFileError,
    InterruptedRunError,
    LayoutError,
    LedgerError,
    MemoptError,
    SignatureError,
    UsageError,
)
from memopt.manifests.atomic_file import TEMPORARY_NAME
from memopt.manifests.file_names import MANIFEST_NAME
from memopt.manifests.keys import PublicKey
from memopt.manifests.manifest import parse_manifest
from memopt.manifests.safetensors_index import INDEX_NAME
from memopt.manifests.sign import SignOptions, sign_release
from memopt.manifests.signer import KeySigner
from memopt.manifests.verify import VerifyOptions, verify_release

MADE = {"memopt.chunks", "memopt.manifest.json", "SHA256SUMS", "model.sig"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_release(tmp_path / "release")
    return tmp_path / "release"


def made_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name in MADE or path.suffix == ".sig"}


def is_verified(folder: Path) -> bool:
    return verify_release(folder, POLICY, VerifyOptions(now=NOW)).is_ok


def test_four_files_that_verify(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    sign(folder)
    assert {path.name for path in folder.iterdir()} == before | MADE
    assert is_verified(folder)


def test_the_manifest_says_what_the_release_is(folder: Path) -> None:
    sign(folder, not_after=CREATED + 50)
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    assert (manifest.identity, manifest.family, manifest.counter) == (IDENTITY, "glm_moe_dsa", 7)
    assert (manifest.created, manifest.not_after, manifest.previous_digest) == (CREATED, CREATED + 50, None)
    assert manifest.source_digest == hashlib.sha256(b'{"kind":"folder"}').hexdigest()
    assert set(manifest.tools) == {"memopt", "memopt sign"}
    roles = {file.path: file.role for file in manifest.files}
    assert roles == {
        "config.json": "config",
        "tokenizer.json": "tokenizer",
        "chat_template.jinja": "template",
        "ledger.jsonl": "ledger",
        "release.json": "other",
        INDEX_NAME: "index",
        "memopt.chunks": "chunks",
        **dict.fromkeys(SHARDS, "weights"),
    }


def test_same_inputs_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "under" / "another name"
    shutil.copytree(folder, copy)
    first = made_files(sign(folder, jobs=1))
    assert made_files(sign(copy, jobs=3)) == first
    assert made_files(sign(folder)) == first


def test_ranks_follow_from_the_rank_folders(tmp_path: Path) -> None:
    write_release(tmp_path / "release", num_ranks=2)
    sign(tmp_path / "release")
    files = parse_manifest((tmp_path / "release" / MANIFEST_NAME).read_bytes()).files
    assert {file.ranks for file in files if file.path.startswith("tp2/rank-1/")} == {(1,)}
    assert {file.ranks for file in files if "/" not in file.path} == {None}


def test_source_date_epoch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12345")
    assert sign_release(folder, [KeySigner(KEY)]).created == 12345
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with refusal(UsageError, "SOURCE_DATE_EPOCH"):
        sign_release(folder, [KeySigner(KEY)])


def test_several_keys_sign_the_same_statement_and_old_signatures_go(folder: Path) -> None:
    second, third = fixed_key(2), fixed_key(3, "p384")
    sign(folder, KEY, second)
    extra = f"model.{second.public_key.hint[:8]}.sig"
    payloads = {json.loads((folder / name).read_bytes())["dsseEnvelope"]["payload"] for name in ("model.sig", extra)}
    assert len(payloads) == 1
    both = replace(POLICY, keys=(*POLICY.keys, replace(POLICY.keys[0], public_key=second.public_key)), threshold=2)
    assert verify_release(folder, both, VerifyOptions(now=NOW)).is_ok
    sign(folder, third)
    assert not (folder / extra).exists()
    with refusal(UsageError, "given twice"):
        sign(folder, KEY, KEY)
    with refusal(UsageError, "nobody signs"):
        sign_release(folder, [])


def test_the_release_before(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "old")
    sign(tmp_path / "old")
    old = (tmp_path / "old" / MANIFEST_NAME).read_bytes()
    options = SignOptions(identity=IDENTITY, created=CREATED, previous=tmp_path / "old")
    result = sign_release(folder, [KeySigner(KEY)], options)
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    assert result.counter == manifest.counter == 8
    assert manifest.previous_digest == hashlib.sha256(old).hexdigest()
    with refusal(UsageError, "does not rise"):
        sign_release(folder, [KeySigner(KEY)], replace(options, counter=7))
    with refusal(UsageError, "another", IDENTITY):
        sign_release(folder, [KeySigner(KEY)], replace(options, identity="another"))


def test_the_name_comes_from_release_json(folder: Path) -> None:
    assert sign_release(folder, [KeySigner(KEY)]).identity == IDENTITY
    (folder / "release.json").unlink()
    with refusal(UsageError, "no name"):
        sign_release(folder, [KeySigner(KEY)])
    assert sign_release(folder, [KeySigner(KEY)], SignOptions(identity="x")).counter == 1


def _append(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + data)


def _write(name: str, data: bytes = b"") -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    return write


def _stale_index(folder: Path) -> None:
    write_index(folder, SHARDS[:1])


def _short_ledger(folder: Path) -> None:
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[1:]))


def _moved_tensor(folder: Path) -> None:
    ledger = (folder / "ledger.jsonl").read_bytes()
    (folder / "ledger.jsonl").write_bytes(ledger.replace(b'"BF16"', b'"F16"', 1))


BAD_TREES: dict[str, tuple[Callable[[Path], object], type[MemoptError], str]] = {
    "link": (lambda f: (f / "link").symlink_to("config.json"), LayoutError, "link"),
    "folder link": (lambda f: (f / "link").symlink_to(f.parent), LayoutError, "link"),
    "fifo": (lambda f: os.mkfifo(f / "pipe"), LayoutError, "pipe"),
    "git": (_write(".gitattributes"), LayoutError, ".gitattributes"),
    "git folder": (_write(".git/config"), LayoutError, ".git"),
    "unfinished": (_write(".memopt/plan.json"), LayoutError, "memopt compress"),
    "case": (_write("Config.json", b"{}"), LayoutError, "one file"),
    "case of ours": (_write("sha256sums"), LayoutError, "one file"),
    "control character": (_write("a\nb"), FileNameError, "control"),
    "direction": (_write("a\u202eb"), FileNameError, "hidden"),
    "backslash": (_write("a\\b"), FileNameError, "backslash"),
    "not utf-8": (lambda f: open(os.fsencode(f) + b"/\xff", "wb").close(), FileNameError, "UTF-8"),
    "trailing bytes": (_append(SHARDS[0], b"x"), HeaderError, SHARDS[0]),
    "not safetensors": (_write(SHARDS[1], b"\xff" * 100), HeaderError, SHARDS[1]),
    "second copy": (lambda f: shutil.copy(f / SHARDS[0], f / "consolidated.safetensors"), LayoutError, "consolidated"),
    "stale shard": (_stale_index, LayoutError, SHARDS[1]),
    "missing shard": (lambda f: (f / SHARDS[1]).unlink(), LayoutError, SHARDS[1]),
    "no index": (lambda f: (f / INDEX_NAME).unlink(), LayoutError, INDEX_NAME),
    "index out": (_write(INDEX_NAME, b'{"weight_map": {"a": "../x.safetensors"}}'), IndexFileError, "../x"),
    "index twice": (_write(INDEX_NAME, b'{"weight_map": {"a": "b", "a": "b"}}'), IndexFileError, "twice"),
    "second index": (_write("other.safetensors.index.json", b"{}"), LayoutError, "second index"),
    "short ledger": (_short_ledger, LayoutError, "ledger.jsonl"),
    "another type": (_moved_tensor, LayoutError, "ledger.jsonl"),
    "broken ledger": (_write("ledger.jsonl", b"{}\n"), LedgerError, "outputs"),
    "ledger gone": (lambda f: (f / "ledger.jsonl").unlink(), LayoutError, "release.json"),
    "ledger changed": (_append("ledger.jsonl", b'{"outputs": []}\n'), ContentError, "ledger.jsonl"),
    "config": (_write("config.json", b"{"), ConfigError, "config.json"),
}


@pytest.mark.parametrize("case", BAD_TREES)
def test_a_bad_tree_is_refused_and_stays_as_it_was(folder: Path, case: str) -> None:
    spoil, error, word = BAD_TREES[case]
    sign(folder)
    before = made_files(folder)
    spoil(folder)
    with pytest.raises(MemoptError) as caught:
        sign(folder)
    assert type(caught.value) is error, str(caught.value)
    assert word in str(caught.value)
    assert made_files(folder) == before
    assert not (folder / TEMPORARY_NAME).exists()


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    with refusal(LayoutError, "no files"):
        sign(tmp_path / "release")


def test_a_left_temporary_file_is_removed(folder: Path) -> None:
    (folder / TEMPORARY_NAME).write_bytes(b"half a manif")
    sign(folder)
    assert not (folder / TEMPORARY_NAME).exists()
    assert is_verified(folder)


class _BadSigner:
    public_key: PublicKey = KEY.public_key

    def __init__(self, failure: BaseException | None = None) -> None:
        self._failure = failure

    def sign(self, pae: bytes) -> bytes:
        if self._failure is not None:
            raise self._failure
        return fixed_key(2).sign(pae)


def test_a_signer_that_fails_leaves_the_old_signature(folder: Path) -> None:
    sign(folder)
    before = made_files(folder)
    options = SignOptions(identity=IDENTITY, counter=8)
    with refusal(SignatureError, "does not hold"):
        sign_release(folder, [_BadSigner()], options)
    with refusal(InterruptedRunError, "not signed anew"):
        sign_release(folder, [_BadSigner(KeyboardInterrupt())], options)
    assert made_files(folder) == before


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"not_after": CREATED}, "expire"),
        ({"counter": -1}, "counter"),
        ({"jobs": 0}, "jobs"),
        ({"created": -5}, "created"),
    ],
)
def test_wrong_options(folder: Path, options: dict[str, int], word: str) -> None:
    with refusal(UsageError, word):
        sign(folder, **options)


def test_code_is_signed_with_a_note(folder: Path) -> None:
    (folder / "modeling_x.py").write_text("")
    (folder / "config.json").write_text('{"text_config": {"auto_map": {"AutoModel": "modeling_x.X"}}}')
    notes = sign_release(folder, [KeySigner(KEY)]).notes
    assert [note.split()[0] for note in notes] == ["modeling_x.py", "config.json"]


@pytest.mark.parametrize("curve", ["p256", "p384", "p521"])
def test_other_tools_accept_it(tmp_path: Path, curve: str) -> None:
    key = fixed_key(5, curve)
    folder = tmp_path / "release"
    write_release(folder, rows=THREE_CHUNKS if curve == "p256" else 1, num_ranks=2)
    (folder / "tp2-notes.txt").write_text("sorts differently by name and by part")
    sign(folder, key, KEY)
    (tmp_path / "key.pub").write_bytes(key.public_key.pem)
    checked = subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    listed = {line.split(": ")[0] for line in checked.stdout.splitlines()}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there - listed == {"SHA256SUMS", "model.sig", f"model.{KEY.public_key.hint[:8]}.sig"}
    command = [sys.executable, "-m", "model_signing", "verify", "key", "--public_key", str(tmp_path / "key.pub")]
    verified = subprocess.run([*command, "--signature", "model.sig", "."], cwd=folder, capture_output=True, text=True)
    assert verified.returncode == 0, verified.stderr
