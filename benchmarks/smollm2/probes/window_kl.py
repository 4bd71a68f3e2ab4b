"""KL of a probe's model to the FP8 source, window by window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.smollm2.probes.probe_texts import window_ids
from benchmarks.smollm2.probes.split_forward import SplitForward
from benchmarks.smollm2.probes.split_model import GatedWeights
from memopt.compressor.evaluate.token_scores import score_logits
from memopt.compressor.evaluate.token_windows import Window


@dataclass(frozen=True, slots=True)
class WindowScores:
    """Figures of one text's windows: predictions, the sum of their KL in nats, how many have the same top-1."""

    num_tokens: tuple[int, ...]
    kl_sums: tuple[float, ...]
    num_same: tuple[int, ...]

    @property
    def kl(self) -> float:
        """Nats a token."""
        return sum(self.kl_sums) / sum(self.num_tokens)

    @property
    def top1(self) -> float:
        """Share of predictions with the base's likeliest token."""
        return sum(self.num_same) / sum(self.num_tokens)


class HeldOutText:
    """Windows of a text, and the source's final rows on them, made once for all probes."""

    def __init__(self, forward: SplitForward, windows: tuple[Window, ...]) -> None:
        self._forward = forward
        self._windows = windows
        self._base = self._rows(forward.model.routed)

    def scores(self, routed: tuple[GatedWeights, ...]) -> WindowScores:
        """Of the model with these routed experts; raises as `score_logits`."""
        rows = self._rows(routed)
        counts: list[int] = []
        sums: list[float] = []
        same: list[int] = []
        first = 0
        for window in self._windows:
            part = slice(first, first + window.num_predicted)
            first += len(window.ids)
            base, probe = (self._forward.logits(found[part]) for found in (self._base, rows))
            found = score_logits(base, probe, torch.from_numpy(window.ids[1:]))
            counts.append(window.num_predicted)
            sums.append(float(found.kl.sum()))
            same.append(int(found.is_top1_same.sum()))
        return WindowScores(tuple(counts), tuple(sums), tuple(same))

    def _rows(self, routed: tuple[GatedWeights, ...]) -> Tensor:
        lengths = [len(window.ids) for window in self._windows]
        return self._forward.run(window_ids(self._windows), lengths, routed)
