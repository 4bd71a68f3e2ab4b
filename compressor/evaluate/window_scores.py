"""Two models' final hidden states on the same windows, compared token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from memopt.compressor.evaluate.token_scores import Counts, TokenScores, joined, placed, score_logits

if TYPE_CHECKING:
    from memopt.compressor.evaluate.streamed_forward import FinalStates
    from memopt.compressor.evaluate.token_windows import Window


def score_windows(
    base: FinalStates,
    release: FinalStates,
    windows: Sequence[Window],
    on_window: Callable[[int, int], None] = lambda done, total: None,
) -> TokenScores:
    """Figures of every prediction, window after window; raises as `score_logits`. `on_window`: (done, of how many)."""
    import torch

    scores: list[TokenScores] = []
    row = 0
    with torch.no_grad():
        for number, window in enumerate(windows, start=1):
            next_ids = torch.from_numpy(window.ids[1:]).to(base.device)
            logits = [states.logits(row, window.num_predicted) for states in (base, release)]
            scores.append(placed(score_logits(logits[0], logits[1], next_ids), window.document, window.start))
            row += len(window.ids)
            on_window(number, len(windows))
    return joined(scores)


def window_numbers(windows: Sequence[Window]) -> Counts:
    """int64 [predictions]: the number of the window, from zero, that each prediction of `score_windows` is in."""
    return np.repeat(np.arange(len(windows), dtype=np.int64), [window.num_predicted for window in windows])
