"""Whether enough trusted keys signed one statement. Nothing of a payload is used before its signature holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from memopt.errors import BundleError, MemoptError, PolicyError, SignatureError, UnsupportedError
from memopt.manifests.bundle import Bundle, legacy_pae, pae, parse_bundle
from memopt.manifests.file_names import SIGNATURE_NAME
from memopt.manifests.keys import PublicKey, verify
from memopt.manifests.policy import TrustPolicy, why_unusable
from memopt.manifests.statement import Statement, parse_statement

MAX_BUNDLES = 16


@dataclass(frozen=True)
class Trusted:
    """A statement that enough trusted keys signed. `signers`: distinct by key material, none revoked or expired."""

    statement: Statement
    root_digest: str
    signers: tuple[PublicKey, ...]


@dataclass
class _Count:
    """Signatures that hold, by SPKI digest: those the policy counts, and those it does not with the reason."""

    usable: dict[str, PublicKey] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def check_signatures(bundles: Sequence[tuple[str, bytes]], policy: TrustPolicy, now: int) -> Trusted:
    """Check every bundle, a pair of file name and bytes, against the policy. `now`: seconds since 1970, UTC.

    A bundle by an unknown key is not counted (a rotation leaves both keys' bundles); one that names a trusted key and
    does not verify is refused. Raises SignatureError, PolicyError when revoked or expired keys were needed to reach
    the threshold, and as `parse_bundle` and `parse_statement`.
    """
    if not bundles:
        raise SignatureError(
            f"the signature is missing: there is no {SIGNATURE_NAME}", remedy="fetch the whole release"
        )
    if len(bundles) > MAX_BUNDLES:
        raise SignatureError(f"{len(bundles)} signature files, at most {MAX_BUNDLES} are read")
    count = _Count()
    proven: list[tuple[str, bytes]] = []
    for file, raw in bundles:
        bundle = parse_bundle(raw, file)
        key, reason = _signer_of(bundle, policy, file, now)
        if key is None:
            count.reasons.append(f"{file}: {reason}")
            continue
        proven.append((file, bundle.payload))
        if reason:
            count.unusable[key.spki_sha256] = f"{file}: {reason}"
        else:
            count.usable[key.spki_sha256] = key
    _check_threshold(count, policy)
    statements = [(file, parse_statement(payload, file)) for file, payload in _distinct(proven)]
    first = statements[0][1]
    for file, statement in statements[1:]:
        if not _is_same(first, statement):
            raise BundleError(f"signs other files than {statements[0][0]} does", file=file, remedy="sign both again")
    return Trusted(first, first.root_digest, tuple(count.usable.values()))


def _distinct(proven: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """One entry for every different payload: further signatures usually carry the same bytes."""
    seen: dict[bytes, str] = {}
    for file, payload in proven:
        seen.setdefault(payload, file)
    return [(file, payload) for payload, file in seen.items()]


def _is_same(one: Statement, other: Statement) -> bool:
    """The same files; order, the subject's name and what was ignored may differ between signing tools."""
    return one.digests() == other.digests()


def _check_threshold(count: _Count, policy: TrustPolicy) -> None:
    if len(count.usable) >= policy.threshold:
        return
    unusable = [reason for spki, reason in count.unusable.items() if spki not in count.usable]
    text = "; ".join([*unusable, *count.reasons])
    if len(count.usable) + len(unusable) >= policy.threshold:
        raise PolicyError(
            f"{len(count.usable)} of {policy.threshold} signatures count: {text}",
            remedy="fetch a release signed by a current key",
        )
    distinct = len({entry.public_key.spki_sha256 for entry in policy.keys})
    if not policy.certificate_roots and distinct < policy.threshold:
        text = "; ".join(part for part in (text, f"the policy holds only {distinct} distinct keys") if part)
    raise SignatureError(
        f"{len(count.usable)} distinct trusted keys signed, {policy.threshold} are needed"
        + (f": {text}" if text else ""),
        remedy="get the release from its publisher, or trust its key in the policy",
    )


def _signer_of(bundle: Bundle, policy: TrustPolicy, file: str, now: int) -> tuple[PublicKey | None, str]:
    """The trusted key that made the bundle, and why it does not count if so; None and the reason if there is none."""
    if bundle.certificates:
        return _certificate_signer(bundle, policy, file, now)
    candidates = {entry.public_key.spki_sha256: entry.public_key for entry in policy.keys}
    message = pae(bundle.payload_type, bundle.payload)
    for key in candidates.values():
        if not verify(key, bundle.signature, message):
            continue
        if bundle.hint is not None and bundle.hint != key.hint:
            raise SignatureError(
                f"names key {bundle.hint[:8]}, but {key.hint[:8]} signed it", file=file, remedy="fetch it again"
            )
        return key, why_unusable(policy, key, now)
    named = [key for key in candidates.values() if bundle.hint in {None, key.hint}]
    for key in named:
        _refuse_legacy(bundle, key, file)
    if bundle.hint is not None and named:
        raise SignatureError(
            f"names the trusted key {bundle.hint[:8]}, but its signature does not hold",
            file=file,
            remedy="fetch the release again from its publisher",
        )
    if bundle.hint is None:
        return None, "no trusted key made this signature"
    known = ", ".join(key.hint[:8] for key in candidates.values()) or "no keys"
    revoked = " (revoked)" if bundle.hint in policy.revoked_keys else ""
    return None, f"signed by key {bundle.hint[:8]}{revoked}, the policy trusts {known}"


def _certificate_signer(bundle: Bundle, policy: TrustPolicy, file: str, now: int) -> tuple[PublicKey | None, str]:
    from memopt.manifests.certificates import chain_key_digests, check_chain

    if not policy.certificate_roots:
        return None, "signed with a certificate, the policy trusts no certificate roots"
    try:
        key = check_chain(bundle.certificates, policy.certificate_roots, now)
    except MemoptError as problem:
        return None, problem.message
    if not verify(key, bundle.signature, pae(bundle.payload_type, bundle.payload)):
        _refuse_legacy(bundle, key, file)
        raise SignatureError("the signature does not hold for its certificate", file=file, remedy="fetch it again")
    if policy.revoked_keys & set(chain_key_digests(bundle.certificates)):
        return key, "a key of its certificate chain is revoked"
    return key, why_unusable(policy, key, now)


def _refuse_legacy(bundle: Bundle, key: PublicKey, file: str) -> None:
    if verify(key, bundle.signature, legacy_pae(bundle.payload_type, bundle.payload)):
        raise UnsupportedError(
            "signed by model-signing 0.2, in a form that is not DSSE", file=file, remedy="sign the release again"
        )
