"""trust.json: strict to read, and every rule of it refuses what it must (rows 20-23)."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from certificate_chains import authority
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal
from signed_statements import payload_of, sha256
from signing_keys import fixed_key

from memopt.errors import (
    FileNameError,
    KeyFileError,
    MemoptError,
    MissingFileError,
    PolicyError,
    PolicyFileError,
    UnsupportedError,
)
from memopt.manifests.manifest import Manifest
from memopt.manifests.policy import (
    TrustedKey,
    TrustPolicy,
    check_policy,
    load_policy,
    parse_policy,
    policy_for_key,
    why_unusable,
)
from memopt.manifests.statement import parse_statement

KEY, OTHER = fixed_key(1).public_key, fixed_key(2).public_key
NOW = 1_800_000_000
STATEMENT = parse_statement(payload_of("config.json", "model.safetensors"))
MANIFEST = Manifest(
    identity="glm",
    family="glm_moe_dsa",
    counter=7,
    created=NOW - 100,
    not_after=NOW + 100,
    previous_digest=None,
    source_digest="0" * 64,
    recipe_digest="0" * 64,
    tools={},
    files=(),
)
POLICY = policy_for_key(KEY)


def text(**fields: Any) -> bytes:
    return json.dumps({"schema": "memopt.trust/1", "keys": [{"pem": KEY.pem.decode()}], **fields}).encode()


def entry(**fields: Any) -> dict[str, Any]:
    return {"pem": KEY.pem.decode(), **fields}


def test_a_short_policy_is_that_of_its_key() -> None:
    assert parse_policy(text()) == POLICY
    assert TrustPolicy(keys=(TrustedKey(KEY),)) == POLICY
    assert (POLICY.threshold, POLICY.allow_code, POLICY.clock_skew_seconds) == (1, False, 300)


def test_the_documents_example_is_a_policy() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trust-policy.md").read_text()
    example = page.split("```json\n")[1].split("```")[0]
    policy = parse_policy(example.encode())
    assert policy.identity == "glm-5.2-int4"
    fields = {*json.loads(example), "certificate_roots"} - {"schema"}
    assert fields == set(TrustPolicy.__dataclass_fields__)
    assert all(f"`{name}`" in page or name == "keys" for name in fields)


def test_every_field_is_read() -> None:
    root = authority()
    policy = parse_policy(
        text(
            keys=[
                entry(hint=KEY.hint, not_before="2026-11-29T18:00:00Z", not_after=2_000_000_000, identities=["a", "b"]),
                {"pem": OTHER.pem.decode()},
            ],
            certificate_roots=[root.pem.decode()],
            threshold=2,
            min_counters={"a": 3, "b": 0},
            identity="a",
            revoked_digests=["a" * 64],
            revoked_keys=["b" * 64],
            max_age_seconds=86_400,
            clock_skew_seconds=0,
            allowed_extra_paths=["notes.md", "logs"],
            allow_code=True,
        )
    )
    assert policy.keys == (TrustedKey(KEY, 1_795_975_200, 2_000_000_000, ("a", "b")), TrustedKey(OTHER))
    assert policy.certificate_roots == (root.der,)
    assert (policy.threshold, policy.identity, policy.min_counters) == (2, "a", {"a": 3, "b": 0})
    assert (policy.revoked_digests, policy.revoked_keys) == (frozenset(["a" * 64]), frozenset(["b" * 64]))
    assert (policy.max_age_seconds, policy.clock_skew_seconds, policy.allow_code) == (86_400, 0, True)
    assert policy.allows_extra("notes.md")
    assert policy.allows_extra("logs/a/b")
    assert not policy.allows_extra("logs2")
    assert not policy.allows_extra("sub/notes.md")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schema": "memopt.trust/2"}, "schema"),
        ({"schema": None}, "schema"),
        ({"keys": []}, "nobody is trusted"),
        ({"keys": {}}, "keys"),
        ({"keys": ["x"]}, "pem"),
        ({"keys": [{}]}, "pem"),
        ({"keys": [{"pem": 1}]}, "pem"),
        ({"keys": [entry(expires=1)]}, "pem"),
        ({"keys": [entry(hint="0" * 64)]}, "hint"),
        ({"keys": [entry(not_after="soon")]}, "not_after"),
        ({"keys": [entry(not_after="2026-11-29T18:00:00+01:00")]}, "not_after"),
        ({"keys": [entry(not_after=True)]}, "not_after"),
        ({"keys": [entry(not_before=-1)]}, "not_before"),
        ({"keys": [entry(not_before=1.5)]}, "not_before"),
        ({"keys": [entry(identities="a")]}, "identities"),
        ({"keys": [entry(identities=[""])]}, "identities"),
        ({"keys": [entry(identities=[None])]}, "identities"),
        ({"revoked_key": []}, "revoked_key"),
        ({"threshold": 0}, "threshold"),
        ({"threshold": True}, "threshold"),
        ({"threshold": "1"}, "threshold"),
        ({"threshold": 1.0}, "threshold"),
        ({"threshold": None}, "threshold"),
        ({"min_counters": []}, "min_counters"),
        ({"min_counters": {"a": -1}}, "a is -1"),
        ({"min_counters": {"a": None}}, "a is None"),
        ({"identity": ""}, "identity"),
        ({"identity": ["a"]}, "identity"),
        ({"revoked_digests": ["A" * 64]}, "revoked_digests"),
        ({"revoked_keys": ["a" * 8]}, "revoked_keys"),
        ({"revoked_keys": [None]}, "revoked_keys"),
        ({"max_age_seconds": 0}, "max_age_seconds"),
        ({"clock_skew_seconds": -1}, "clock_skew_seconds"),
        ({"clock_skew_seconds": 10**20}, "clock_skew_seconds"),
        ({"allowed_extra_paths": "x"}, "allowed_extra_paths"),
        ({"allowed_extra_paths": [1]}, "allowed_extra_paths"),
        ({"allow_code": 1}, "allow_code"),
        ({"allow_code": "false"}, "allow_code"),
        ({"certificate_roots": ["x"]}, "certificate root"),
        ({"certificate_roots": [1]}, "certificate_roots"),
    ],
)
def test_malformed_policies(fields: dict[str, Any], words: str) -> None:
    with refusal(PolicyFileError, "trust.json", words):
        parse_policy(text(**fields))


@pytest.mark.parametrize("path", ["../x", "/x", "", "a/", "."])
def test_extra_paths_are_plain_names(path: str) -> None:
    with refusal(FileNameError):
        parse_policy(text(allowed_extra_paths=[path]))


def test_keys_that_cannot_be_used() -> None:
    with refusal(KeyFileError, "trust.json"):
        parse_policy(text(keys=[{"pem": "junk"}]))
    with refusal(KeyFileError, "public key"):
        parse_policy(text(keys=[{"pem": fixed_key().to_pem(None).decode()}]))
    ed25519 = (
        "-----BEGIN PUBLIC KEY-----\n"
        "MCowBQYDK2VwAyEAGb9ECWmEzf6FQbrBZ9w7lshQhqowtrbLDFw4rXAxZuE=\n-----END PUBLIC KEY-----"
    )
    with refusal(UnsupportedError, "Ed25519"):
        parse_policy(text(keys=[{"pem": ed25519}]))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xef\xbb\xbf" + text(),
        text() + b"x",
        text().replace(b'"schema"', b'"keys":[],"schema"'),
        b"{" * 9999,
    ],
)
def test_a_policy_is_strict_json(raw: bytes) -> None:
    with refusal(PolicyFileError, "trust.json"):
        parse_policy(raw)


def test_a_policy_is_capped_in_size(tmp_path: Path) -> None:
    with refusal(PolicyFileError, "1,048,576"):
        parse_policy(text() + b" " * 2**20)
    (tmp_path / "big.json").write_bytes(text() + b" " * 2**20)
    with refusal(PolicyFileError, "big.json", "1,048,576"):
        load_policy(tmp_path / "big.json")


def test_a_policy_file_may_be_a_link_as_in_a_config_map(tmp_path: Path) -> None:
    (tmp_path / "..data").write_bytes(text())
    (tmp_path / "trust.json").symlink_to("..data")
    assert load_policy(tmp_path / "trust.json") == POLICY
    with refusal(MissingFileError, "none.json"):
        load_policy(tmp_path / "none.json")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(text()) - 1), st.integers(1, 255))
def test_a_changed_byte_never_gives_a_traceback(position: int, change: int) -> None:
    raw = bytearray(text())
    raw[position] ^= change
    with contextlib.suppress(MemoptError):
        parse_policy(bytes(raw))


def check(policy: TrustPolicy, now: int = NOW, *, signers: Any = (KEY,), **fields: Any) -> list[str]:
    manifest = None if fields.get("manifest", 0) is None else replace(MANIFEST, **fields)
    errors = check_policy(policy, manifest, STATEMENT, signers, now)
    assert all(type(error) is PolicyError and error.remedy for error in errors)
    return [str(error) for error in errors]


def only(errors: list[str], *words: str) -> None:
    assert len(errors) == 1, errors
    for word in words:
        assert word in errors[0]


def test_a_release_within_the_rules() -> None:
    assert check(POLICY) == []
    assert check(replace(POLICY, identity="glm", min_counters={"glm": 7, "other": 99}, max_age_seconds=100)) == []
    assert check(POLICY, not_after=None) == []


def test_another_model_is_refused() -> None:
    only(check(replace(POLICY, identity="kimi")), "'glm'", "'kimi'")


def test_an_older_release_is_refused() -> None:
    policy = replace(POLICY, min_counters={"glm": 8})
    only(check(policy), "counter 7", "floor 8")
    assert check(policy, counter=8) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (MANIFEST.not_after + 1, ["expired at 2027-01-15T08:01:40Z", "it is 2027-01-15T08:01:41Z"]),
        (MANIFEST.created - 301, ["not yet valid", "2027-01-15T07:58:20Z"]),
        (0, ["not yet valid", "2027-01-15T07:58:20Z", "1970-01-01T00:00:00Z", "clock"]),
    ],
)
def test_times_are_shown_with_both_ends(now: int, words: list[str]) -> None:
    only(check(POLICY, now), *words)


def test_times_at_the_edge() -> None:
    assert check(POLICY, MANIFEST.not_after) == []
    assert check(POLICY, MANIFEST.created - 300) == []
    only(check(replace(POLICY, clock_skew_seconds=0), MANIFEST.created - 1), "not yet valid")
    aged = replace(POLICY, max_age_seconds=50)
    assert check(aged, MANIFEST.created + 50) == []
    only(check(aged, MANIFEST.created + 51), "older than the 50 seconds")
    only(check(POLICY, 2**53, not_after=2**52), "expired", "s after 1970")


def test_revoked_digests_are_refused() -> None:
    for digest, name in ((STATEMENT.root_digest, "the release"), (sha256("config.json"), "config.json")):
        only(check(replace(POLICY, revoked_digests=frozenset([digest]))), "revoked", name, digest)
    assert check(replace(POLICY, revoked_digests=frozenset(["0" * 64]))) == []


def test_revoked_keys_are_refused_under_both_names() -> None:
    for name in (KEY.hint, KEY.spki_sha256):
        only(check(replace(POLICY, revoked_keys=frozenset([name]))), "revoked", KEY.hint[:8])


def test_a_key_counts_for_its_identities_and_its_time_only() -> None:
    limited = TrustPolicy(keys=(TrustedKey(KEY, NOW - 10, NOW + 10, ("glm",)),))
    assert check(limited) == []
    only(check(limited, identity="kimi"), "may not sign 'kimi'")
    only(check(limited, manifest=None), "may not sign")
    assert check(limited, NOW + 10) == []
    assert check(limited, NOW - 10) == []
    only(check(limited, NOW + 11), "was valid until 2027-01-15T08:00:10Z")
    only(check(limited, NOW - 11), "is valid from 2027-01-15T07:59:50Z")
    assert why_unusable(limited, OTHER, NOW) == ""
    only(check(TrustPolicy(keys=(TrustedKey(KEY, identities=()),))), "may not sign")


def test_two_entries_of_one_key_are_its_two_rights() -> None:
    both = TrustPolicy(keys=(TrustedKey(KEY, None, NOW - 1, None), TrustedKey(KEY, NOW, None, ("glm",))))
    assert check(both) == []
    only(check(both, identity="kimi"), "may not sign")
    assert check(both, NOW - 50, identity="kimi") == []


def test_a_threshold_counts_allowed_keys_by_their_material() -> None:
    two = TrustPolicy(keys=(TrustedKey(KEY), TrustedKey(OTHER, identities=("kimi",))), threshold=2)
    only(check(two, signers=(KEY, OTHER)), "1 allowed keys", "2 are needed", OTHER.hint[:8])
    only(check(two, signers=(KEY, KEY)), "1 allowed keys")
    assert check(two, signers=(KEY, OTHER), identity="kimi") == []


def test_a_key_outside_the_policy_counts_only_through_a_certificate() -> None:
    only(check(POLICY, signers=(OTHER,)), "0 allowed keys")
    assert check(replace(POLICY, certificate_roots=(b"root",)), signers=(OTHER,)) == []


@pytest.mark.parametrize("fields", [{"identity": "glm"}, {"min_counters": {"glm": 1}}, {"max_age_seconds": 9}])
def test_without_a_manifest_whatever_needs_one_is_refused(fields: dict[str, Any]) -> None:
    assert check(POLICY, manifest=None) == []
    only(check(replace(POLICY, **fields), manifest=None), "no memopt.manifest.json", next(iter(fields)))


def test_everything_that_is_wrong_is_listed() -> None:
    policy = replace(
        POLICY, identity="kimi", min_counters={"glm": 9}, revoked_digests=frozenset([STATEMENT.root_digest])
    )
    assert len(check(policy, NOW + 1000, signers=(OTHER,))) == 5
