"""The statement parser: one method, plain names, true root digest (rows 13, 26, 31, 32, 35-38)."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from signed_statements import Bend, payload_of, resources, sha256

from memopt.errors import BundleError, FileNameError, LayoutError, MemoptError, PolicyError, UnsupportedError
from memopt.manifests import statement as statement_module
from memopt.manifests.statement import GIT_PATHS, Resource, parse_statement, render_statement, root_digest

NAMES = ("sub-b.bin", "sub/b.bin", "a.json", "sub.c", "sub/a/x", "Z", "é.txt")


def test_round_trip_in_the_references_order() -> None:
    payload = render_statement("model", resources(*NAMES))
    statement = parse_statement(payload)
    assert [entry.name for entry in statement.resources] == sorted(NAMES, key=PurePosixPath)
    assert statement.subject_name == "model"
    assert statement.digests() == {name: sha256(name) for name in NAMES}
    raw = b"".join(bytes.fromhex(sha256(name)) for name in sorted(NAMES, key=PurePosixPath))
    assert statement.root_digest == hashlib.sha256(raw).hexdigest()
    assert statement.ignore_paths == tuple(sorted((*GIT_PATHS, "model.sig")))
    assert render_statement("model", resources(*reversed(NAMES))) == payload


def test_every_signature_name_is_left_out() -> None:
    payload = render_statement("m", resources("a"), ["model.sig", "model.0123abcd.sig"])
    assert "model.0123abcd.sig" in parse_statement(payload).ignore_paths


def test_any_order_is_read() -> None:
    payload = payload_of(*NAMES, bend=lambda t: t["predicate"]["resources"].reverse())
    assert parse_statement(payload).digests() == parse_statement(payload_of(*NAMES)).digests()


def test_a_descriptor_may_have_more_fields() -> None:
    assert parse_statement(payload_of(bend=lambda t: entry(t).update(mediaType="x", annotations={})))


def entry(table: dict[str, Any]) -> dict[str, Any]:
    return table["predicate"]["resources"][0]


def serialization(table: dict[str, Any]) -> dict[str, Any]:
    return table["predicate"]["serialization"]


def subject(table: dict[str, Any]) -> dict[str, Any]:
    return table["subject"][0]


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (lambda t: t.update(_type="https://in-toto.io/Statement/v0.1"), "_type"),
        (lambda t: t.pop("_type"), "fields"),
        (lambda t: t.update(more=1), "fields"),
        (lambda t: t.update(predicateType="https://slsa.dev/provenance/v1"), "slsa.dev"),
        (lambda t: t.update(predicateType=["x"]), "predicateType"),
        (lambda t: t.update(subject=[]), "one subject"),
        (lambda t: t.update(subject=t["subject"] * 2), "one subject"),
        (lambda t: t.update(subject=[1]), "subject"),
        (lambda t: subject(t).pop("name"), "subject"),
        (lambda t: subject(t).update(name=1), "name"),
        (lambda t: subject(t).update(name="x" * 2000), "name"),
        (lambda t: subject(t).update(digest={"sha256": "0" * 64, "sha512": "0"}), "digest"),
        (lambda t: subject(t).update(digest={"sha1": "0" * 40}), "digest"),
        (lambda t: t.update(predicate=[]), "predicate"),
        (lambda t: t["predicate"].update(more=1), "fields"),
        (lambda t: t["predicate"].pop("resources"), "fields"),
        (lambda t: t["predicate"].update(serialization=0), "serialization"),
        (lambda t: serialization(t).update(method="tree"), "method"),
        (lambda t: serialization(t).update(shard_size=1), "fields"),
        (lambda t: serialization(t).pop("allow_symlinks"), "fields"),
        (lambda t: serialization(t).update(allow_symlinks=0), "allow_symlinks"),
        (lambda t: serialization(t).update(allow_symlinks="false"), "allow_symlinks"),
        (lambda t: serialization(t).update(hash_type="sha1"), "hash_type"),
        (lambda t: serialization(t).update(hash_type="SHA256"), "hash_type"),
        (lambda t: serialization(t).update(ignore_paths="x"), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=[1]), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=["."]), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=[""]), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=["../x"]), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=["/etc"]), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=["weights/"]), "ignore_paths"),
        (lambda t: serialization(t).update(ignore_paths=["*"]), "pattern"),
        (lambda t: serialization(t).update(ignore_paths=["a?", "b[1]"]), "pattern"),
        (lambda t: serialization(t).update(ignore_paths=[".git", ".git"]), "repeats"),
        (lambda t: t["predicate"].update(resources=[]), "0 files"),
        (lambda t: t["predicate"].update(resources={}), "files"),
        (lambda t: t["predicate"]["resources"].append("x"), "resource"),
        (lambda t: t["predicate"]["resources"].append(dict(entry(t))), "twice"),
        (lambda t: entry(t).update(name=5), "named"),
        (lambda t: entry(t).update(name=".git/config"), "ignored"),
        (lambda t: entry(t).update(name=".gitattributes"), "ignored"),
        (lambda t: entry(t).update(name="model.sig"), "ignored"),
        (lambda t: entry(t).update(name="model.00000000.sig"), "ignored"),
        (lambda t: entry(t).pop("algorithm"), "algorithm"),
        (lambda t: entry(t).update(algorithm="sha1"), "algorithm"),
        (lambda t: entry(t).update(algorithm="blake3"), "algorithm"),
        (lambda t: entry(t).update(algorithm=None), "algorithm"),
        (lambda t: entry(t).update(digest=sha256("a").upper()), "digest"),
        (lambda t: entry(t).update(digest=sha256("a")[:63]), "digest"),
        (lambda t: entry(t).update(digest="sha256:" + sha256("a")), "digest"),
        (lambda t: entry(t).update(digest="../" + sha256("a")[3:]), "digest"),
        (lambda t: entry(t).update(digest=sha256("a") + "\n"), "digest"),
        (lambda t: entry(t).update(digest=["0" * 64]), "digest"),
    ],
)
def test_malformed_statements(bend: Bend, words: str) -> None:
    with refusal(BundleError, "model.sig", words):
        parse_statement(payload_of(bend=bend))


@pytest.mark.parametrize(
    "name",
    [
        "x" * 300,
        "a/" * 600 + "a",
        "",
        "../x",
        "/x",
        "a/../b",
        "./a",
        "a//b",
        "a\\b",
        "a\x00b",
        "C:x",
        "a/",
        ".",
        "..",
        "a\u202eb",
        "a\nb",
        "a/.",
    ],
)
def test_names_that_could_mean_another_file(name: str) -> None:
    with refusal(FileNameError):
        parse_statement(payload_of(bend=lambda t: entry(t).update(name=name)))


@pytest.mark.parametrize(("one", "other"), [("a", "A"), ("é", "e\u0301"), ("straße", "STRASSE"), ("x/b", "X/b")])
def test_names_that_are_one_file_on_some_systems(one: str, other: str) -> None:
    def bend(table: dict[str, Any]) -> None:
        first, second = table["predicate"]["resources"]
        first["name"], second["name"] = one, other

    with refusal(LayoutError, "one file"):
        parse_statement(payload_of("a", "b", bend=bend))


@pytest.mark.parametrize("path", ["weights", "modeling.py", "sub/.git", ".github/workflows", "model.xyz.sig"])
def test_a_signer_may_not_leave_out_more_than_git(path: str) -> None:
    with refusal(PolicyError, path):
        parse_statement(payload_of(bend=lambda t: serialization(t).update(ignore_paths=[path])))


@pytest.mark.parametrize(
    ("bend", "words"),
    [
        (lambda t: t.update(predicateType="https://model_signing/Digests/v0.1"), "0.x"),
        (lambda t: serialization(t).update(method="shards", shard_size=1000), "shards"),
        (lambda t: serialization(t).update(hash_type="blake2b"), "blake2b"),
        (lambda t: serialization(t).update(hash_type="blake3"), "blake3"),
        (lambda t: serialization(t).update(allow_symlinks=True), "allow_symlinks"),
    ],
)
def test_other_methods_are_unsupported(bend: Bend, words: str) -> None:
    with refusal(UnsupportedError, "model.sig", words):
        parse_statement(payload_of(bend=bend))


@pytest.mark.parametrize(
    "bend",
    [
        lambda t: t["predicate"]["resources"].reverse(),
        lambda t: t["predicate"]["resources"].pop(),
        lambda t: entry(t).update(digest="0" * 64),
        lambda t: subject(t)["digest"].update(sha256="0" * 64),
    ],
)
def test_the_root_digest_must_be_the_lists(bend: Bend) -> None:
    with refusal(BundleError, "root digest"):
        parse_statement(payload_of(bend=bend, fix_root=False))


def test_the_number_of_files_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statement_module, "MAX_FILES", 1)
    with refusal(BundleError, "2 files"):
        parse_statement(payload_of("a", "b"))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        payload_of() + b"x",
        b"\xef\xbb\xbf" + payload_of(),
        payload_of().replace(b'"subject"', b'"_type":"x","subject"'),
        payload_of().replace(b'"allow_symlinks":false', b'"allow_symlinks":false,"allow_symlinks":true'),
        payload_of().replace(b'"allow_symlinks":false', b'"allow_symlinks":NaN'),
        payload_of().replace(b'"name":"model"', b'"name":"\\udc00"'),
    ],
)
def test_the_payload_is_strict_json(raw: bytes) -> None:
    with refusal(BundleError, "model.sig"):
        parse_statement(raw)


def test_nothing_is_written_that_cannot_be_read() -> None:
    for names in (["../x"], [".git/x"]):
        with pytest.raises(MemoptError):
            render_statement("m", resources(*names))
    with refusal(BundleError, "0 files"):
        render_statement("m", [])
    with refusal(BundleError, "twice"):
        render_statement("m", resources("a", "a"))
    with refusal(PolicyError, "weights"):
        render_statement("m", resources("a"), ["weights"])


PAYLOAD = payload_of(*NAMES)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(PAYLOAD) - 1), st.integers(1, 255))
def test_a_changed_byte_never_gives_a_traceback(position: int, change: int) -> None:
    raw = bytearray(PAYLOAD)
    raw[position] ^= change
    with contextlib.suppress(MemoptError):
        parse_statement(bytes(raw))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = [("_type",), ("subject",), ("subject", 0), ("subject", 0, "digest"), ("predicate",)]
PATHS += [("predicate", "serialization"), ("predicate", "resources"), ("predicate", "resources", 0)]
PATHS += [("predicate", "serialization", name) for name in ("method", "hash_type", "allow_symlinks", "ignore_paths")]
PATHS += [("predicate", "resources", 0, name) for name in ("name", "digest", "algorithm")]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(PATHS), JSON)
def test_any_json_in_any_place_never_gives_a_traceback(path: tuple[str | int, ...], value: Any) -> None:
    table = json.loads(PAYLOAD)
    place: Any = table
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with contextlib.suppress(MemoptError):
        parse_statement(json.dumps(table).encode())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab-./é", min_size=1, max_size=6), min_size=1, max_size=8, unique=True))
def test_the_order_is_that_of_paths(names: list[str]) -> None:
    try:
        statement = parse_statement(render_statement("m", resources(*names)))
    except MemoptError:
        return
    wanted = sorted(names, key=PurePosixPath)
    assert [entry.name for entry in statement.resources] == wanted
    assert statement.root_digest == root_digest(map(sha256, wanted))
    assert statement.resources[0] == Resource(wanted[0], sha256(wanted[0]))
