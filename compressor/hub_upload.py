"""One commit of many files on the Hub, through huggingface_hub's public calls, with its errors in plain words.

Why not `upload_folder`: it walks the folder itself, so a file that appeared after the verification would go along; it
obeys a .gitignore; and it makes several commits, so that readers see half a release. `upload_large_folder` of
huggingface_hub 1 (gone in 2) also writes `.cache/` into the folder. Here the files are given one by one, transferred
in batches that need no second transfer after an interruption (Xet and LFS know by digests what they have), compared,
and then appear in one commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import ERROR
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from memopt.compressor.checkpoint.hub import HubReference
from memopt.compressor.checkpoint.hub_http import hub_endpoint
from memopt.errors import ContentError, InterruptedRunError, MemoptError, NetworkError, UsageError
from memopt.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

# After an interruption at most the batch in flight is sent again.
BATCH_SIZE_BYTES = 16 * 2**30
BATCH_NUM_FILES = 250
_RUN_AGAIN = "run the same command again: what the Hub has is not sent again"
_MAX_WORDS_LENGTH = 300
_NO_TELEMETRY = "HF_HUB_DISABLE_TELEMETRY"


class UploadProgress(Protocol):
    """Told the bytes that are done and all of them, after every batch; `file` is the batch's last."""

    def __call__(self, file: str, done_bytes: int, total_bytes: int, /) -> None: ...


@dataclass(frozen=True)
class Upload:
    """A file to send: its name in the repository, its content (or where that lies), size in bytes, SHA-256 in hex."""

    path: str
    content: bytes | Path
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CommitRequest:
    """`parent`: the commit that the branch must still be at. `deleted`: files that this commit removes."""

    reference: HubReference
    parent: str
    message: str
    uploads: tuple[Upload, ...]
    deleted: tuple[str, ...] = ()


def upload_commit(request: CommitRequest, progress: UploadProgress | None = None) -> str:
    """Transfer every file, compare what was sent with its digest, then commit all at once; returns the commit (hex).

    Raises ContentError (a file is not what it was when it was verified), UsageError (no access, no such repository,
    a refused file), NetworkError.
    """
    with _quiet(), _plain_errors(request.reference):
        from huggingface_hub import CommitOperationDelete, HfApi

        api = HfApi(endpoint=hub_endpoint(), library_name="memopt", library_version=__version__)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationDelete(path_in_repo=path, is_folder=False) for path in request.deleted
        ]
        total, done = sum(upload.size_bytes for upload in request.uploads), 0
        for batch in _batches(request.uploads):
            additions = [_addition(upload) for upload in batch]
            _transfer(api, request.reference, batch, additions)
            operations += additions
            done += sum(upload.size_bytes for upload in batch)
            if progress is not None:
                progress(batch[-1].path, done, total)
        info = api.create_commit(
            repo_id=request.reference.repo_id,
            operations=operations,
            commit_message=request.message,
            revision=request.reference.revision,
            parent_commit=request.parent,
        )
        return str(info.oid)


def _addition(upload: Upload) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    content = upload.content if isinstance(upload.content, bytes) else str(upload.content)
    return CommitOperationAdd(path_in_repo=upload.path, path_or_fileobj=content)


def _transfer(
    api: HfApi, reference: HubReference, batch: Sequence[Upload], additions: Sequence[CommitOperationAdd]
) -> None:
    # Xet hashes the very bytes that it sends, so no digest is told to it: it is compared afterwards, before the commit.
    api.preupload_lfs_files(
        repo_id=reference.repo_id, additions=additions, revision=reference.revision, free_memory=False
    )
    for upload, addition in zip(batch, additions, strict=True):
        sent = addition.upload_info.sha256.hex()
        if sent != upload.sha256:
            raise ContentError(
                f"has SHA-256 {sent} while it is uploaded, the release says {upload.sha256}: it changed after it was"
                " verified; nothing was committed",
                file=upload.path,
                remedy="stop whatever writes into the release, make it again, then push",
            )


def _batches(uploads: Sequence[Upload]) -> Iterator[list[Upload]]:
    batch: list[Upload] = []
    size = 0
    for upload in uploads:
        if batch and (size + upload.size_bytes > BATCH_SIZE_BYTES or len(batch) >= BATCH_NUM_FILES):
            yield batch
            batch, size = [], 0
        batch.append(upload)
        size += upload.size_bytes
    if batch:
        yield batch


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no telemetry while we use huggingface_hub: a user's upload is no reason for further requests.

    Its headers may ask for a list of agents, and hf_xet, which reads the environment, reports transfers.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    telemetry, verbosity, bars = constants.HF_HUB_DISABLE_TELEMETRY, logging.get_verbosity(), True
    in_environment = os.environ.get(_NO_TELEMETRY)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    os.environ[_NO_TELEMETRY] = "1"
    logging.set_verbosity(ERROR)
    bars_from_environment = constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    if not bars_from_environment:
        bars = not are_progress_bars_disabled()
        disable_progress_bars()
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if in_environment is None:
            del os.environ[_NO_TELEMETRY]
        else:
            os.environ[_NO_TELEMETRY] = in_environment
        logging.set_verbosity(verbosity)
        if not bars_from_environment and bars:
            enable_progress_bars()


def _transport_error() -> type[Exception]:
    # huggingface_hub 1 stands on httpx, 2 on httpx2; its own error derives from that library's.
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__module__.partition(".")[0] in {"httpx", "httpx2"})


@contextmanager
def _plain_errors(reference: HubReference) -> Iterator[None]:
    """Turn what huggingface_hub and hf_xet raise into one MemoptError without URLs, which may be signed."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except MemoptError:
        raise
    except KeyboardInterrupt:
        raise InterruptedRunError(f"{reference}: stopped during the upload", remedy=_RUN_AGAIN) from None
    except (_transport_error(), OSError, ValueError, RuntimeError) as problem:
        link: BaseException | None = problem
        while link is not None and not isinstance(link, HfHubHTTPError):
            link = link.__cause__
        if link is not None:
            raise _refusal(reference, link) from problem
        if type(problem) is ValueError or isinstance(problem, FileNotFoundError):
            words = " ".join(str(problem).split())[:_MAX_WORDS_LENGTH]
            raise UsageError(f"{reference}: the upload was refused: {words}", remedy="correct the release") from problem
        cause = problem.__cause__ or problem
        raise NetworkError(
            f"{reference}: the upload broke off ({type(cause).__name__})", remedy=_RUN_AGAIN
        ) from problem


def _refusal(reference: HubReference, error: OSError) -> MemoptError:
    status = int(error.response.status_code)  # type: ignore[attr-defined]  # HfHubHTTPError always has one
    words = " ".join(str(getattr(error, "server_message", None) or "").split())[:_MAX_WORDS_LENGTH]
    said = f": {words}" if words else ""
    if status in {401, 403}:
        return UsageError(
            f"Hub repository {reference.repo_id}: this user may not write to it (HTTP {status}){said}",
            remedy="set HF_TOKEN to a token that may write",
        )
    if status == 404:
        return UsageError(
            f"Hub repository {reference.repo_id} or its branch {reference.revision} is not there for this user"
            f" (HTTP 404){said}",
            remedy="create it first, and set HF_TOKEN to a token that may write",
        )
    if status in {409, 412}:
        return NetworkError(
            f"{reference}: somebody else committed meanwhile (HTTP {status}){said}; nothing was committed",
            remedy="run the same command again",
        )
    if status in {408, 429} or status >= 500:
        return NetworkError(f"{reference}: the Hub answered HTTP {status}{said}", remedy=_RUN_AGAIN)
    return UsageError(f"{reference}: the Hub refused the upload (HTTP {status}){said}", remedy="correct what it names")
