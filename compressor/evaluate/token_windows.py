"""Windows of tokens: equal ones for calibration, packed; and stretches of documents for measuring."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memopt.compressor.evaluate.calibration_data import MIN_DOCUMENT_TOKENS, TokenData, TokenIds
from memopt.errors import DataFileError, UsageError


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens `ids` int64 [n] of the data file's document `document` (from 0), from its token `start` on."""

    document: int
    start: int
    ids: TokenIds

    @property
    def num_predicted(self) -> int:
        """Tokens that have one before them in the window."""
        return len(self.ids) - 1


def packed_windows(data: TokenData, num_windows: int, window_tokens: int) -> TokenIds:
    """int64 [num_windows, window_tokens]: evenly spaced over the documents laid end to end, none overlapping another.

    No token is added between documents. The same for the same file whatever else runs. DataFileError when the data is
    too short.
    """
    if num_windows < 1 or window_tokens < MIN_DOCUMENT_TOKENS:
        raise UsageError(f"{num_windows} samples of {window_tokens} tokens", remedy="ask for 1 sample of 2 or more")
    num_whole = data.digest.num_tokens // window_tokens
    if num_whole < num_windows:
        raise DataFileError(
            f"the data has {data.digest.num_tokens:,} tokens, {num_windows:,} samples of {window_tokens:,} need "
            f"{num_windows * window_tokens:,}",
            remedy="give more text, or ask for fewer or shorter samples",
        )
    stream = np.concatenate(data.documents)
    starts = [number * num_whole // num_windows * window_tokens for number in range(num_windows)]
    return np.stack([stream[start : start + window_tokens] for start in starts])


def document_windows(data: TokenData, window_tokens: int, max_windows: int | None = None) -> tuple[Window, ...]:
    """Every document cut into stretches of `window_tokens`, its last one shorter; stretches of one token are left out.

    `max_windows`: that many of them, evenly spaced. UsageError for windows that predict nothing.
    """
    if window_tokens < MIN_DOCUMENT_TOKENS or (max_windows is not None and max_windows < 1):
        raise UsageError(
            f"windows of {window_tokens} tokens, at most {max_windows}", remedy="ask for 1 window of 2 tokens or more"
        )
    windows = [
        Window(number, start, document[start : start + window_tokens])
        for number, document in enumerate(data.documents)
        for start in range(0, len(document) - 1, window_tokens)
    ]
    if max_windows is None or max_windows >= len(windows):
        return tuple(windows)
    return tuple(windows[number * len(windows) // max_windows] for number in range(max_windows))
