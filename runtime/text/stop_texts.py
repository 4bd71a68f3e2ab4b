"""Texts that end an answer, found across the borders of its pieces."""

from __future__ import annotations

from collections.abc import Iterable


class StopTexts:
    """Watches one answer for its stop texts, whatever pieces it comes in.

    The one that is complete first ends the answer, where it begins (of two that end together, the longer); nothing of
    it is handed out. A piece's end that could be the beginning of a stop text waits for the next piece.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """`texts`: none of them empty."""
        self._texts = tuple(texts)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text was found; nothing is handed out any more."""
        return self._is_stopped

    def push(self, text: str) -> str:
        """What of the answer is certain now that `text` has come."""
        if self._is_stopped or not self._texts:
            return "" if self._is_stopped else text
        seen = self._held + text
        found = [(place + len(stop), place) for stop in self._texts if (place := seen.find(stop)) >= 0]
        if found:
            self._is_stopped = True
            self._held = ""
            return seen[: min(found)[1]]
        num_held = self._num_held(seen)
        certain, self._held = seen[: len(seen) - num_held], seen[len(seen) - num_held :]
        return certain

    def flush(self) -> str:
        """What still waits when the answer ends for another reason."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, seen: str) -> int:
        """Length of the longest end of `seen` that a stop text, longer than it, begins with."""
        longest = min(len(seen), max(map(len, self._texts)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(seen[len(seen) - length :]) for stop in self._texts):
                return length
        return 0
