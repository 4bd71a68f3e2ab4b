"""Reading the Hub's answers: which are refusals, which may pass, and which bytes of a file they carry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memopt.compressor.checkpoint.disk_errors import RUN_AGAIN
from memopt.compressor.checkpoint.hub_types import HubReference
from memopt.errors import MissingFileError, NetworkError, SourceChangedError, UsageError

if TYPE_CHECKING:
    import httpx2

_RETRIED_STATUS = {408, 425, 429, 500, 502, 503, 504}
_MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True)
class Target:
    """What a request is about, for messages and URLs."""

    reference: HubReference
    commit: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"{self.reference}: {self.file}" if self.file else str(self.reference)


class TransientError(Exception):
    """A failure that may pass; `wait_s` is what the server asked for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s


def check_answer(target: Target, response: httpx2.Response, has_token: bool) -> None:
    """Raise unless the answer is a 200 or 206 of the right commit; TransientError where asking again may help."""
    status = response.status_code
    # A signed storage URL behind a redirect may have run out; the Hub gives a new one.
    if status in _RETRIED_STATUS or (response.history and status in {401, 403}):
        after = response.headers.get("retry-after", "")
        raise TransientError(f"HTTP {status}", min(float(after), _MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0)
    if status in {401, 403, 404}:
        raise refusal(target, status, response.headers.get("x-error-code", ""), has_token)
    if status == 416 and target.file:
        raise SourceChangedError(f"{target} is shorter than the Hub's listing says", remedy=RUN_AGAIN)
    if status not in {200, 206}:
        raise NetworkError(f"{target}: unexpected HTTP {status}", remedy="check HF_ENDPOINT")
    commits = {r.headers["x-repo-commit"] for r in (*response.history, response) if "x-repo-commit" in r.headers}
    if target.commit and commits - {target.commit}:
        raise SourceChangedError(
            f"{target}: the server sent another commit than {target.commit}", remedy="run the same command again"
        )


def refusal(target: Target, status: int, code: str, has_token: bool) -> UsageError | MissingFileError:
    reference = target.reference
    if status == 404 and target.file and code in {"", "EntryNotFound"}:
        return MissingFileError(f"{reference} lists {target.file} but has no such file", remedy=RUN_AGAIN)
    if status == 404 and code == "RevisionNotFound":
        return UsageError(
            f"Hub repository {reference.repo_id} has no revision {reference.revision!r} (HTTP 404)",
            remedy="name an existing branch, tag or commit after the @",
        )
    if code == "GatedRepo" or status == 403:
        problem = "is gated: this user may not read it"
    else:
        problem = "does not exist, or this user may not read it"
    token = "the token that was sent gives no access" if has_token else "HF_TOKEN is not set"
    return UsageError(
        f"Hub repository {reference.repo_id} {problem} (HTTP {status})",
        remedy=f"check the name; for a private or gated one accept its terms on the Hub and set HF_TOKEN ({token})",
    )


def size_changed(target: Target, expected: int, found: str) -> SourceChangedError:
    return SourceChangedError(
        f"{target}: the Hub lists {expected:,} bytes, the server sends {found}", remedy="run the same command again"
    )


def read_at_most(response: httpx2.Response, max_size_bytes: int, target: Target) -> bytes:
    raw = bytearray()
    for chunk in response.iter_bytes():
        raw += chunk
        if len(raw) > max_size_bytes:
            raise NetworkError(
                f"{target}: the answer is larger than {max_size_bytes:,} bytes", remedy="check HF_ENDPOINT"
            )
    return bytes(raw)


def first_byte(response: httpx2.Response, asked: int, size_bytes: int, target: Target) -> int:
    """Where the answer's first byte lies in the file; SourceChangedError if the file has another size than listed."""
    if response.status_code == 206:
        unit, _, rest = response.headers.get("content-range", "").partition(" ")
        span, _, total = rest.partition("/")
        first = span.partition("-")[0]
        if unit != "bytes" or first != str(asked):
            raise NetworkError(f"{target}: the server sent another range than asked for", remedy=RUN_AGAIN)
        if total.isdecimal() and int(total) != size_bytes:
            raise size_changed(target, size_bytes, total)
        return asked
    length = response.headers.get("content-length", "")
    if "content-encoding" not in response.headers and length.isdecimal() and int(length) != size_bytes:
        raise size_changed(target, size_bytes, f"{int(length):,}")
    return 0
