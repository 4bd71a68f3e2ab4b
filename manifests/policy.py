"""trust.json: which keys may sign which releases, and what is refused even if a trusted key signed it.

The format is described in docs/trust-policy.md. A policy comes from the operator, never from the release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from memopt.errors import MemoptError, PolicyError, PolicyFileError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.file_names import check_file_name
from memopt.manifests.keys import PublicKey, load_public_key
from memopt.manifests.manifest import MAX_FILE_SIZE_BYTES, Manifest
from memopt.manifests.statement import Statement
from memopt.manifests.strict_json import parse_json_object, read_capped

POLICY_SCHEMA = "memopt.trust/1"
POLICY_NAME = "trust.json"
MAX_POLICY_SIZE_BYTES = 2**20
DEFAULT_CLOCK_SKEW_SECONDS = 300
_MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class TrustedKey:
    """A key that may sign. Times: seconds since 1970, UTC, both inclusive. `identities`: None for every release."""

    public_key: PublicKey
    not_before: int | None = None
    not_after: int | None = None
    identities: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TrustPolicy:
    """What the operator trusts. `certificate_roots`: DER. `threshold`: how many distinct keys must have signed.

    `min_counters`: identity -> lowest release counter. `identity`: the one release wanted, None for any.
    `revoked_digests`: SHA-256 (hex) of root digests or of single files. `revoked_keys`: key hints or SPKI digests.
    `clock_skew_seconds`: how far a signer's clock may be ahead; an expiry is exact.
    """

    keys: tuple[TrustedKey, ...]
    certificate_roots: tuple[bytes, ...] = ()
    threshold: int = 1
    min_counters: Mapping[str, int] = field(default_factory=dict)
    identity: str | None = None
    revoked_digests: frozenset[str] = frozenset()
    revoked_keys: frozenset[str] = frozenset()
    max_age_seconds: int | None = None
    clock_skew_seconds: int = DEFAULT_CLOCK_SKEW_SECONDS
    allowed_extra_paths: tuple[str, ...] = ()
    allow_code: bool = False

    def allows_extra(self, name: str) -> bool:
        """Whether `name` may lie in the folder unsigned: an allowed path, or below one."""
        return any(name == path or name.startswith(path + "/") for path in self.allowed_extra_paths)

    def is_revoked(self, key: PublicKey) -> bool:
        """Whether the key was revoked, by hint or by SPKI digest."""
        return key.hint in self.revoked_keys or key.spki_sha256 in self.revoked_keys


def policy_for_key(public: PublicKey) -> TrustPolicy:
    """The policy that `--key` means: this key, any identity, nothing revoked, no code."""
    return TrustPolicy(keys=(TrustedKey(public),))


def load_policy(path: str | Path) -> TrustPolicy:
    """Read and parse a policy file. Raises as `parse_policy`, and MissingFileError or MemoptIOError."""
    return parse_policy(read_capped(Path(path), MAX_POLICY_SIZE_BYTES, PolicyFileError), str(path))


def _refuse(message: str, file: str) -> PolicyFileError:
    return PolicyFileError(message, file=file, remedy="see docs/trust-policy.md")


_FIELDS = set(TrustPolicy.__dataclass_fields__) | {"schema"}


def parse_policy(raw: bytes, file: str = POLICY_NAME) -> TrustPolicy:
    """Parse trust.json. Raises PolicyFileError for anything out of form, a misspelt field included.

    A key that cannot be used raises as `load_public_key`.
    """
    if len(raw) > MAX_POLICY_SIZE_BYTES:
        raise _refuse(f"{len(raw):,} bytes, at most {MAX_POLICY_SIZE_BYTES:,} are read", file)
    table = parse_json_object(raw, file, PolicyFileError)
    if table.get("schema") != POLICY_SCHEMA:
        raise _refuse(f"schema is {table.get('schema')!r:.80}, this version reads {POLICY_SCHEMA}", file)
    unknown = sorted(set(table) - _FIELDS)
    if unknown:
        raise _refuse(f"unknown fields {unknown!r:.200}", file)
    keys = tuple(_parse_key(entry, file) for entry in _list(table, "keys", file))
    roots = tuple(_parse_root(text, file) for text in _list(table, "certificate_roots", file))
    if not keys and not roots:
        raise _refuse("neither keys nor certificate_roots: nobody is trusted", file)
    extra = tuple(_list(table, "allowed_extra_paths", file))
    for path in extra:
        if not isinstance(path, str):
            raise _refuse("allowed_extra_paths is not a list of paths", file)
        check_file_name(path)
    allow_code = table.get("allow_code", False)
    if not isinstance(allow_code, bool):
        raise _refuse("allow_code is not true or false", file)
    identity = table.get("identity")
    if identity is not None and (not isinstance(identity, str) or not identity):
        raise _refuse("identity is not a name", file)
    return TrustPolicy(
        keys=keys,
        certificate_roots=roots,
        threshold=_integer(table, "threshold", file, minimum=1, default=1),
        min_counters=_parse_counters(table, file),
        identity=identity,
        revoked_digests=_digests(table, "revoked_digests", file),
        revoked_keys=_digests(table, "revoked_keys", file),
        max_age_seconds=None
        if table.get("max_age_seconds") is None
        else _integer(table, "max_age_seconds", file, minimum=1, default=1),
        clock_skew_seconds=_integer(table, "clock_skew_seconds", file, minimum=0, default=DEFAULT_CLOCK_SKEW_SECONDS),
        allowed_extra_paths=extra,
        allow_code=allow_code,
    )


def _list(table: dict[str, Any], name: str, file: str) -> list[Any]:
    value = table.get(name, [])
    if not isinstance(value, list) or len(value) > _MAX_ENTRIES:
        raise _refuse(f"{name} is not a list of at most {_MAX_ENTRIES:,} entries", file)
    return value


def _integer(table: dict[str, Any], name: str, file: str, *, minimum: int, default: int) -> int:
    value = table.get(name, default)
    if type(value) is not int or not minimum <= value <= MAX_FILE_SIZE_BYTES:
        raise _refuse(f"{name} is {value!r:.80}, not a whole number from {minimum}", file)
    return value


def _digests(table: dict[str, Any], name: str, file: str) -> frozenset[str]:
    digests = _list(table, name, file)
    for digest in digests:
        if not is_hex_digest(digest):
            raise _refuse(f"{name}: {digest!r:.80} is not 64 lower-case hex digits", file)
    return frozenset(digests)


def _time(entry: dict[str, Any], name: str, file: str) -> int | None:
    """Seconds since 1970, or a UTC time like 2026-11-29T18:00:00Z."""
    value = entry.get(name)
    if value is None:
        return None
    if type(value) is int and 0 <= value <= MAX_FILE_SIZE_BYTES:
        return value
    if isinstance(value, str):
        try:
            return int(datetime.strptime(value, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp())
        except ValueError:
            pass
    raise _refuse(f"{name} is {value!r:.80}, not seconds since 1970 or a time like 2026-11-29T18:00:00Z", file)


def _parse_key(entry: Any, file: str) -> TrustedKey:
    allowed = {"pem", "hint", "not_before", "not_after", "identities"}
    if not isinstance(entry, dict) or not isinstance(entry.get("pem"), str) or not set(entry) <= allowed:
        raise _refuse(f"a key must have pem, and may have {', '.join(sorted(allowed - {'pem'}))}", file)
    public = load_public_key(entry["pem"].encode(), file)
    hint = entry.get("hint")
    if hint is not None and hint != public.hint:
        raise _refuse(f"a key's hint is {hint!r:.80}, its PEM gives {public.hint}", file)
    identities = entry.get("identities")
    if identities is not None and (
        not isinstance(identities, list) or not all(isinstance(name, str) and name for name in identities)
    ):
        raise _refuse("a key's identities are not a list of names", file)
    return TrustedKey(
        public,
        _time(entry, "not_before", file),
        _time(entry, "not_after", file),
        None if identities is None else tuple(identities),
    )


def _parse_root(text: Any, file: str) -> bytes:
    from memopt.manifests.certificates import certificate_from_pem

    if not isinstance(text, str):
        raise _refuse("certificate_roots is not a list of PEM texts", file)
    return certificate_from_pem(text.encode(), file)


def _parse_counters(table: dict[str, Any], file: str) -> dict[str, int]:
    counters = table.get("min_counters", {})
    if not isinstance(counters, dict) or len(counters) > _MAX_ENTRIES:
        raise _refuse("min_counters is not an object of identity and counter", file)
    return {name: _integer(counters, name, file, minimum=0, default=0) for name in counters}


def time_text(seconds: int) -> str:
    """A time for people, in UTC; the plain number where the calendar ends."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"{seconds} s after 1970"


def why_unusable(policy: TrustPolicy, key: PublicKey, now: int) -> str:
    """Why the policy does not count a signature by this key now (revoked, outside its validity); "" if it does.

    A key of a certificate chain has no entry of its own: its validity is the certificate's.
    """
    if policy.is_revoked(key):
        return f"key {key.hint[:8]} is revoked"
    entries = [entry for entry in policy.keys if entry.public_key.spki_sha256 == key.spki_sha256]
    reason = ""
    for entry in entries:
        if entry.not_before is not None and now < entry.not_before:
            reason = f"key {key.hint[:8]} is valid from {time_text(entry.not_before)}, it is {time_text(now)}"
        elif entry.not_after is not None and now > entry.not_after:
            reason = f"key {key.hint[:8]} was valid until {time_text(entry.not_after)}, it is {time_text(now)}"
        else:
            return ""
    return reason


def _may_sign(policy: TrustPolicy, key: PublicKey, identity: str | None, now: int) -> bool:
    if why_unusable(policy, key, now):
        return False
    entries = [entry for entry in policy.keys if entry.public_key.spki_sha256 == key.spki_sha256]
    if not entries:
        return bool(policy.certificate_roots)
    return any(
        entry.identities is None or identity in entry.identities
        for entry in entries
        if (entry.not_before is None or now >= entry.not_before) and (entry.not_after is None or now <= entry.not_after)
    )


def check_policy(
    policy: TrustPolicy, manifest: Manifest | None, statement: Statement, signers: Sequence[PublicKey], now: int
) -> list[MemoptError]:
    """Everything that the policy forbids about a release whose signatures hold; empty if it may be used.

    `manifest` is None when the release has none (model_signing signed it): whatever the policy demands of it is then
    refused. `now`: seconds since 1970, UTC.
    """
    errors: list[MemoptError] = []
    identity = manifest.identity if manifest is not None else None
    for digest, what in [(statement.root_digest, "the release"), *((r.sha256, r.name) for r in statement.resources)]:
        if digest in policy.revoked_digests:
            errors.append(PolicyError(f"{what!r:.200} was revoked, digest {digest}", remedy="use another release"))
    errors += _check_signers(policy, identity, signers, now)
    if manifest is None:
        demands = [
            ("identity", policy.identity is not None),
            ("min_counters", bool(policy.min_counters)),
            ("max_age_seconds", policy.max_age_seconds is not None),
        ]
        wanted = [name for name, is_wanted in demands if is_wanted]
        if wanted:
            errors.append(
                PolicyError(
                    f"the release has no memopt.manifest.json, but the policy demands {', '.join(wanted)}",
                    remedy="sign it with `memopt sign`",
                )
            )
        return errors
    return errors + _check_manifest(policy, manifest, now)


def _check_signers(
    policy: TrustPolicy, identity: str | None, signers: Sequence[PublicKey], now: int
) -> list[MemoptError]:
    distinct = {key.spki_sha256: key for key in signers}
    allowed = [key for key in distinct.values() if _may_sign(policy, key, identity, now)]
    if len(allowed) >= policy.threshold:
        return []
    reasons = [
        why_unusable(policy, key, now)
        or f"key {key.hint[:8]} may not sign {identity or 'a release without identity'!r}"
        for key in distinct.values()
        if key not in allowed
    ]
    return [
        PolicyError(
            f"{len(allowed)} allowed keys signed, {policy.threshold} are needed: {'; '.join(reasons) or 'no others'}",
            remedy="sign with an allowed key, or change the policy",
        )
    ]


def _check_manifest(policy: TrustPolicy, manifest: Manifest, now: int) -> list[MemoptError]:
    errors: list[MemoptError] = []

    def forbid(message: str, remedy: str) -> None:
        errors.append(PolicyError(message, remedy=remedy))

    if policy.identity is not None and manifest.identity != policy.identity:
        forbid(f"this is {manifest.identity!r:.200}, wanted is {policy.identity!r:.200}", "fetch the release wanted")
    floor = policy.min_counters.get(manifest.identity)
    if floor is not None and manifest.counter < floor:
        forbid(f"release counter {manifest.counter} is below the floor {floor}: an older release", "fetch a newer one")
    if manifest.not_after is not None and now > manifest.not_after:
        forbid(f"expired at {time_text(manifest.not_after)}, it is {time_text(now)}", "fetch a newer release")
    if manifest.created > now + policy.clock_skew_seconds:
        forbid(
            f"not yet valid: created {time_text(manifest.created)}, it is {time_text(now)}",
            "check this machine's clock",
        )
    if policy.max_age_seconds is not None and now - manifest.created > policy.max_age_seconds:
        forbid(
            f"created {time_text(manifest.created)}, it is {time_text(now)}: older than the {policy.max_age_seconds:,} "
            "seconds allowed",
            "fetch a newer release",
        )
    return errors
