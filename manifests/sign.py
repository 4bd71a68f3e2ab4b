"""Signing a release: every file is looked at and hashed once, then manifest and signature are written beside it.

Order: memopt.chunks, memopt.manifest.json, SHA256SUMS, model.sig, further signatures. The old signatures go first, so
that none ever stands beside files that it does not cover. Same inputs, same bytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memopt.errors import ContentError, InterruptedRunError, LayoutError, MemoptIOError, SignatureError, UsageError
from memopt.manifests.atomic_file import TEMPORARY_NAME, remove_at, write_at
from memopt.manifests.bundle import PAYLOAD_TYPE, pae, render_bundle
from memopt.manifests.chunk_file import render_chunks
from memopt.manifests.code_check import check_code
from memopt.manifests.digest import CHUNK_SIZE_BYTES, FileDigest, chunk_root
from memopt.manifests.file_names import (
    CHUNKS_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    SUMS_NAME,
    check_file_name,
    first_collision,
    is_signature_name,
)
from memopt.manifests.file_roles import LEDGER_NAME, is_weights, ranks_of, role_of
from memopt.manifests.hashing import WatchCallback, hash_files
from memopt.manifests.keys import verify
from memopt.manifests.ledger_check import check_ledger
from memopt.manifests.ledger_digests import LedgerDigests
from memopt.manifests.ledger_output import ledger_outputs
from memopt.manifests.manifest import Manifest, ManifestFile, parse_manifest, render_manifest
from memopt.manifests.release_description import (
    RELEASE_NAME,
    ReleaseDescription,
    describe,
    next_counter,
    read_previous,
)
from memopt.manifests.signed_files import PlainFiles
from memopt.manifests.signer import Signer
from memopt.manifests.statement import GIT_PATHS, Resource, parse_statement, render_statement
from memopt.manifests.tree import open_root, scan_tree
from memopt.manifests.weights_check import check_weights
from memopt.manifests.workers import default_jobs
from memopt.version import __version__

# Where a `memopt compress` that is not finished keeps its state.
_UNFINISHED_FOLDERS = (".memopt", ".memopt-finished")
# (bytes hashed, bytes to hash, file)
ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SignOptions:
    """`identity`: the release's name (None: release.json's). `counter`: rises with every release of that identity
    (None: one more than `previous`, or 1). `created`, `not_after`: seconds since 1970, UTC (`created` None:
    SOURCE_DATE_EPOCH, or the clock's). `previous`: the release before, its folder or manifest. `jobs`: threads.
    """

    identity: str | None = None
    counter: int | None = None
    created: int | None = None
    not_after: int | None = None
    previous: Path | None = None
    jobs: int | None = None


@dataclass(frozen=True)
class SignResult:
    """`root_digest`: hex, as `model_signing digest` prints it. `num_files`, `size_bytes`: all that was signed."""

    root_digest: str
    identity: str
    counter: int
    created: int
    not_after: int | None
    num_files: int
    size_bytes: int
    signature_names: tuple[str, ...]
    notes: tuple[str, ...]


def sign_release(
    folder: str | Path,
    signers: Sequence[Signer],
    options: SignOptions | None = None,
    progress: ProgressCallback | None = None,
) -> SignResult:
    """Write manifest, chunk digests, SHA256SUMS and one signature a signer into `folder`, replacing earlier ones.

    A tree that no verifier would accept is refused: LayoutError, FileNameError, HeaderError, IndexFileError,
    LedgerError, ContentError, ConfigError. UsageError for the call, SignatureError if a signer fails, MemoptIOError.
    """
    options = options or SignOptions()
    created = _created(options)
    names_of_signatures = _signature_names(signers)
    jobs = default_jobs() if options.jobs is None else options.jobs
    if jobs < 1:
        raise UsageError(f"{jobs} jobs do nothing", remedy="use 1 or more")
    root_fd = open_root(folder)
    try:
        if not os.access(".", os.W_OK, dir_fd=root_fd):
            raise MemoptIOError("the folder cannot be written to", file=str(folder), remedy="make it writable")
        sizes = _list_files(root_fd)
        description, notes = _check_parts(root_fd, sizes, jobs)
        identity = options.identity or description.name
        if not identity:
            raise UsageError("the release has no name", remedy="give an identity")
        previous, previous_digest = (None, None) if options.previous is None else read_previous(options.previous)
        counter = next_counter(options.counter, identity, previous)
        digests = _hash(root_fd, sizes, jobs, progress, _ledger_watch(root_fd, sizes))
        _check_ledger_digest(description, digests)
        chunks = render_chunks((name, digest.leaves) for name, digest in digests.items())
        digests[CHUNKS_NAME] = digest_of(chunks)
        manifest = Manifest(
            identity=identity,
            family=description.family or "",
            counter=counter,
            created=created,
            not_after=options.not_after,
            previous_digest=previous_digest,
            source_digest=description.source_digest,
            recipe_digest=description.recipe_digest,
            tools=description.tools | {"memopt sign": __version__},
            files=tuple(_entry(name, digest) for name, digest in digests.items()),
        )
        files = _render(manifest, chunks)
        sha256 = {name: digest.sha256 for name, digest in digests.items()}
        sha256 |= {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        resources = [Resource(name, digest) for name, digest in sha256.items()]
        payload = render_statement(identity, resources, names_of_signatures)
        for name, signer in zip(names_of_signatures, signers, strict=True):
            files[name] = _sign(payload, signer)
        _write(root_fd, files)
    except KeyboardInterrupt:
        raise InterruptedRunError("stopped: the release is not signed anew", remedy="sign it again") from None
    finally:
        os.close(root_fd)
    return SignResult(
        root_digest=parse_statement(payload).root_digest,
        identity=identity,
        counter=counter,
        created=created,
        not_after=options.not_after,
        num_files=len(sha256),
        size_bytes=sum(digest.size_bytes for digest in digests.values())
        + sum(len(files[name]) for name in (MANIFEST_NAME, SUMS_NAME)),
        signature_names=names_of_signatures,
        notes=notes,
    )


def created_time() -> int:
    """When a release signed now was made: SOURCE_DATE_EPOCH, or the clock's seconds since 1970; UsageError."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not (text.isascii() and text.isdigit()):
        raise UsageError(f"SOURCE_DATE_EPOCH is {text[:80]!r}", remedy="it must be seconds since 1970")
    return int(text) if text else int(time.time())


def _created(options: SignOptions) -> int:
    created = created_time() if options.created is None else options.created
    for name, value in (("created", created), ("not_after", options.not_after), ("counter", options.counter)):
        if value is not None and not 0 <= value < 2**53:
            raise UsageError(f"{name} is {value}, it must be within 0 and 2**53 - 1")
    if options.not_after is not None and options.not_after <= created:
        raise UsageError(f"it would expire ({options.not_after}) before it is made ({created})")
    return created


def _signature_names(signers: Sequence[Signer]) -> tuple[str, ...]:
    if not signers:
        raise UsageError("nobody signs", remedy="give a key or a sign command")
    hints = [signer.public_key.hint for signer in signers]
    names = (SIGNATURE_NAME, *(f"model.{hint[:8]}.sig" for hint in hints[1:]))
    if len({signer.public_key.spki_sha256 for signer in signers}) != len(signers) or len(set(names)) != len(names):
        raise UsageError("a key is given twice", remedy="one signature a key is enough")
    return names


def _list_files(root_fd: int) -> dict[str, int]:
    """Name and size of every file to sign; refuses what no release may hold."""
    tree = scan_tree(root_fd)
    for problem in tree.problems:
        raise problem
    made = {CHUNKS_NAME, MANIFEST_NAME, SUMS_NAME, TEMPORARY_NAME}
    sizes: dict[str, int] = {}
    for name, status in sorted(tree.files.items()):
        top = name.split("/", 1)[0]
        if top in _UNFINISHED_FOLDERS:
            raise LayoutError(
                "holds the state of an unfinished run", file=top, remedy="run `memopt compress` to its end"
            )
        if top in GIT_PATHS:
            raise LayoutError("cannot be signed: other verifiers skip Git's files", file=name, remedy="remove it")
        if name in made or is_signature_name(name):
            continue
        check_file_name(name)
        sizes[name] = status.size_bytes
    collision = first_collision([*sizes, *sorted(made), SIGNATURE_NAME])
    if collision is not None:
        raise LayoutError(
            f"{collision[0]!a} and {collision[1]!a} are one file on some systems", remedy="rename one of them"
        )
    if not sizes:
        raise LayoutError("holds no files", file=".", remedy="name the folder of a release")
    return sizes


def _check_parts(root_fd: int, sizes: Mapping[str, int], jobs: int) -> tuple[ReleaseDescription, tuple[str, ...]]:
    """Headers, index, ledger and configurations, as a verifier will look at them; raises the first problem."""
    source = PlainFiles(root_fd)
    weights = check_weights(sizes, source, sizes, jobs)
    problems = [*weights.problems, *check_code(sizes, source, sizes, allow_code=True)]
    if LEDGER_NAME in sizes:
        problems += check_ledger(source, weights.tensors, [name for name in sizes if is_weights(name)])
    for problem in problems:
        raise problem
    description = describe(sizes, source)
    if description.ledger_sha256 is not None and LEDGER_NAME not in sizes:
        raise LayoutError("is missing: release.json names it", file=LEDGER_NAME, remedy="compress again")
    code = check_code(sizes, source, sizes, allow_code=False)
    notes = [f"{error.file} is or names code: verifiers need allow_code in their policy" for error in code]
    others = [name for name in sizes if role_of(name) == "other" and name != RELEASE_NAME]
    notes += [f"{name} is signed too, though it has no known place in a release" for name in others]
    return description, tuple(notes)


def _ledger_watch(root_fd: int, sizes: Mapping[str, int]) -> dict[str, WatchCallback]:
    """For each weight file of the ledger, the comparison of its tensors' bytes: a false ledger is not signed."""
    if LEDGER_NAME not in sizes:
        return {}
    source = PlainFiles(root_fd)
    digests = LedgerDigests(ledger_outputs(source.lines(LEDGER_NAME)))
    watches = {name: digests.watch(name, source) for name in sizes if is_weights(name)}
    return {name: watch for name, watch in watches.items() if watch is not None}


def _hash(
    root_fd: int,
    sizes: Mapping[str, int],
    jobs: int,
    progress: ProgressCallback | None,
    watch: Mapping[str, WatchCallback],
) -> dict[str, FileDigest]:
    total = sum(sizes.values())
    done = 0

    def advance(name: str, size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        if progress is not None:
            progress(done, total, name)

    return hash_files(root_fd, sizes, jobs, advance, watch)


def _check_ledger_digest(description: ReleaseDescription, digests: Mapping[str, FileDigest]) -> None:
    expected = description.ledger_sha256
    if expected is not None and digests[LEDGER_NAME].sha256 != expected:
        raise ContentError(f"is not the ledger that {RELEASE_NAME} names", file=LEDGER_NAME, remedy="compress again")


def digest_of(data: bytes) -> FileDigest:
    """The digest of bytes in memory."""
    leaves = (
        hashlib.sha256(data[start : start + CHUNK_SIZE_BYTES]).digest()
        for start in range(0, len(data), CHUNK_SIZE_BYTES)
    )
    return FileDigest(len(data), hashlib.sha256(data).hexdigest(), b"".join(leaves))


def _entry(name: str, digest: FileDigest) -> ManifestFile:
    root = chunk_root(digest.size_bytes, digest.leaves)
    return ManifestFile(name, digest.size_bytes, digest.sha256, role_of(name), ranks_of(name), root)


def _render(manifest: Manifest, chunks: bytes) -> dict[str, bytes]:
    """The three unsigned files, in the order in which they are written."""
    raw = render_manifest(manifest)
    parse_manifest(raw)  # what is written can be read
    sums = {file.path: file.sha256 for file in manifest.files} | {MANIFEST_NAME: hashlib.sha256(raw).hexdigest()}
    return {CHUNKS_NAME: chunks, MANIFEST_NAME: raw, SUMS_NAME: render_sums(sums)}


def render_sums(digests: Mapping[str, str]) -> bytes:
    """SHA256SUMS for `sha256sum -c`, sorted by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def _sign(payload: bytes, signer: Signer) -> bytes:
    message = pae(PAYLOAD_TYPE, payload)
    signature = signer.sign(message)
    if not verify(signer.public_key, signature, message):
        raise SignatureError("the signer returned a signature that does not hold", remedy="check key and sign command")
    return render_bundle(payload, signature, signer.public_key)


def _write(root_fd: int, files: Mapping[str, bytes]) -> None:
    for name in _old_signatures(root_fd):
        remove_at(root_fd, name)
    for name, data in files.items():
        write_at(root_fd, name, data)


def _old_signatures(root_fd: int) -> Collection[str]:
    return [name for name in os.listdir(root_fd) if is_signature_name(name)]
