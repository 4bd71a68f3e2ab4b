"""One answer's text: its tokens decoded as they come, cut at its stop texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memopt.runtime.text.stop_texts import StopTexts
from memopt.runtime.text.text_stream import TextStream


class AnswerText:
    """What a request's caller sees; the engine's TextWatcher."""

    def __init__(self, bytes_of: Callable[[int], bytes], stop: Iterable[str] = ()) -> None:
        """`bytes_of` as for TextStream, `stop` as for StopTexts."""
        self._stream = TextStream(bytes_of)
        self._stops = StopTexts(stop)

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that is certain now, whether a stop text has ended the answer)."""
        certain = self._stops.push(self._stream.push(token_id))
        return certain, self._stops.is_stopped

    def flush(self) -> str:
        """What was held back, when the answer ends for another reason than a stop text."""
        return self._stops.push(self._stream.flush()) + self._stops.flush()
