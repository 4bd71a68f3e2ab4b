"""Requests to the Hub: retries, resuming, and errors in plain words. Authentication and proxies are huggingface_hub's.

`hf_hub_download` is not used: since huggingface_hub 2 it throws a partial file away when a call fails, so a cut
connection at 90 % of a shard would start again at zero. `HfApi` is not used either: building its headers may ask
huggingface.co for a telemetry list, even when HF_ENDPOINT names another server.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote, urlsplit

from memopt.compressor.checkpoint.disk_errors import RUN_AGAIN
from memopt.compressor.checkpoint.hub_answers import (
    Target,
    TransientError,
    check_answer,
    first_byte,
    read_at_most,
    size_changed,
)
from memopt.compressor.checkpoint.hub_types import HubReference
from memopt.errors import InterruptedRunError, NetworkError, UsageError

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

_TRUE_WORDS = {"1", "ON", "YES", "TRUE"}
# An attempt that brought this much counts as a success, so that a long file survives any number of cuts.
_USEFUL_PROGRESS_BYTES = 2**20


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is tried without progress, and the waits between (seconds, doubling)."""

    attempts: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 8.0


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network, now or when huggingface_hub was imported."""
    if any(os.environ.get(name, "").upper() in _TRUE_WORDS for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return True
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def hub_endpoint() -> str:
    """The server's URL, from HF_ENDPOINT as it is now; UsageError if that is not an http(s) URL."""
    from huggingface_hub import constants

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    # A password in the URL would end up in messages.
    if not valid or "@" in endpoint or not endpoint.isprintable() or " " in endpoint:
        raise UsageError("HF_ENDPOINT is not an http or https URL of a server", remedy="correct it or unset it")
    return endpoint


def _headers() -> dict[str, str]:
    from huggingface_hub import constants, get_token

    headers = {"user-agent": "memopt", "accept-encoding": "identity"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token:
        # The HTTP library would quote the value in its own error.
        if not token.isascii() or not token.isprintable() or " " in token:
            raise UsageError("the Hub token holds characters that no token has", remedy="set HF_TOKEN again")
        headers["authorization"] = f"Bearer {token}"
    return headers


def _transport_errors(session: object) -> tuple[type[Exception], ...]:
    # huggingface_hub 1 stands on httpx, 2 on httpx2; the session says which.
    for base in type(session).__mro__:
        module = sys.modules.get(base.__module__.partition(".")[0])
        error = getattr(module, "HTTPError", None)
        if isinstance(error, type) and issubclass(error, Exception):
            return (error,)
    return ()


@dataclass(frozen=True)
class HubClient:
    """One server and how to ask it. `stop`, once set, ends every transfer of this client."""

    endpoint: str
    retry: RetryPolicy
    headers: Mapping[str, str] = field(repr=False)
    stop: threading.Event = field(default_factory=threading.Event, repr=False)

    @classmethod
    def from_environment(cls, retry: RetryPolicy) -> HubClient:
        """A client for HF_ENDPOINT with the user's token, both as they are now; UsageError if either is malformed."""
        return cls(hub_endpoint(), retry, _headers())

    def file_url(self, target: Target) -> str:
        commit, file = target.commit or target.reference.revision, target.file or ""
        return f"{self.endpoint}/{target.reference.repo_id}/resolve/{quote(commit, safe='')}/{quote(file)}"

    def fetch_listing(self, reference: HubReference, max_size_bytes: int) -> bytes:
        """The JSON that describes `reference` and its files; NetworkError, UsageError (no such repository)."""
        revision = quote(reference.revision, safe="")
        url = f"{self.endpoint}/api/models/{reference.repo_id}/revision/{revision}?blobs=true"
        target = Target(reference)

        def step() -> bytes:
            with self._open(target, url, None) as response:
                return read_at_most(response, max_size_bytes, target)

        return self._try(target, step)

    def fetch_range(self, target: Target, start: int, length: int, size_bytes: int) -> bytes:
        """Bytes [start, start + length) of a file of `size_bytes`; NetworkError, SourceChangedError."""

        def step() -> bytes:
            with self._open(target, self.file_url(target), (start, start + length - 1)) as response:
                if first_byte(response, start, size_bytes, target) != start or response.status_code != 206:
                    raise NetworkError(
                        f"{target}: the server ignores Range requests, so headers cannot be read alone",
                        remedy="download the whole checkpoint, or use another HF_ENDPOINT",
                    )
                raw = read_at_most(response, length, target)
            if len(raw) < length:
                raise TransientError(f"the answer ended after {len(raw):,} of {length:,} bytes")
            return raw

        return self._try(target, step)

    def fetch_file(self, target: Target, path: Path, size_bytes: int, tick: Callable[[int], None]) -> None:
        """Bring `path` to `size_bytes`, continuing behind what it already holds; `tick` gets the bytes so far.

        Raises NetworkError (the part on disk is kept), SourceChangedError (another size), MissingFileError, UsageError.
        """

        def step() -> None:
            have = _size_of(path)
            if have > size_bytes:
                path.unlink()
                have = 0
            if have == size_bytes and path.exists():
                return
            byte_range = (have, size_bytes - 1) if have else None
            with self._open(target, self.file_url(target), byte_range) as response:
                position = first_byte(response, have, size_bytes, target)
                with open(path, "ab") as out:
                    out.truncate(position)
                    for chunk in response.iter_bytes():
                        position += len(chunk)
                        if position > size_bytes:
                            raise size_changed(target, size_bytes, f"more than {size_bytes:,}")
                        out.write(chunk)
                        tick(position)
                        self._check_stop(target)
            if position < size_bytes:
                raise TransientError(f"the answer ended after {position:,} of {size_bytes:,} bytes")

        self._try(target, step, lambda: _size_of(path))

    def _check_stop(self, target: Target) -> None:
        if self.stop.is_set():
            raise InterruptedRunError(f"{target}: stopped", remedy=RUN_AGAIN)

    def _try(self, target: Target, step: Callable[[], T], done: Callable[[], int] = lambda: 0) -> T:
        failures, reached = 0, done()
        while True:
            self._check_stop(target)
            try:
                return step()
            except TransientError as error:
                now = done()
                failures = 1 if now - reached >= _USEFUL_PROGRESS_BYTES else failures + 1
                reached = max(reached, now)
                if failures >= self.retry.attempts:
                    where = f" with {now:,} bytes on disk" if now else ""
                    raise NetworkError(
                        f"{target}: {error.reason}; gave up after {failures} attempts{where} ({self.endpoint})",
                        remedy=RUN_AGAIN,
                    ) from error.__cause__
                wait_s = min(self.retry.first_wait_s * 2.0 ** (failures - 1), self.retry.longest_wait_s)
                self.stop.wait(max(wait_s, error.wait_s))

    @contextmanager
    def _open(self, target: Target, url: str, byte_range: tuple[int, int] | None) -> Iterator[httpx2.Response]:
        from huggingface_hub import constants, get_session

        headers = dict(self.headers)
        if byte_range is not None:
            headers["range"] = f"bytes={byte_range[0]}-{byte_range[1]}"
        session = get_session()
        timeout_s = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        try:
            with session.stream("GET", url, headers=headers, timeout=timeout_s, follow_redirects=True) as response:
                check_answer(target, response, "authorization" in self.headers)
                yield response
        except _transport_errors(session) as error:
            kind = type(error).__name__
            if kind == "ConnectError":
                # Name resolution, refusal, certificates: the system's own words help most.
                raise TransientError(f"cannot connect: {error}") from error
            # The text of others may hold a signed URL or a header, so only the kind is told.
            raise TransientError(f"the connection failed or broke off ({kind})") from error


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
