"""Waves of experts: what they hold while they run."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibrated_runs import NUM_SAMPLES, SAMPLE_TOKENS, compress, experts, options, recipe, write_ids
from tiny_checkpoints import make_checkpoint
from torch import Tensor

from memopt.compressor.calibrate.expert_waves import ExpertCalibration


def test_tokens_for_coverage_are_in_memory_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes of a wave choose them, and the budget has room for one set."""
    choose = ExpertCalibration._choose_forced
    held: list[int] = []
    chosen: list[int] = []

    def watched(self: ExpertCalibration, wave: range, counts: Tensor) -> dict[int, Tensor]:
        held.append(len(self._forced))
        found = choose(self, wave, counts)
        chosen.append(sum(len(rows) for rows in found.values()))
        return found

    monkeypatch.setattr(ExpertCalibration, "_choose_forced", watched)
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", num_nextn_predict_layers=0)
    form = recipe([experts("weighted", max_fallback=1.0)], "glm4_moe")
    asked = options(write_ids(tmp_path / "ids.safetensors"), coverage_tokens=NUM_SAMPLES * SAMPLE_TOKENS)
    compress(source, tmp_path / "out", form, asked, workers=1)
    gate_up, down = chosen[::2], chosen[1::2]
    assert gate_up == down
    assert min(chosen) > 0
    assert held == [0] * len(chosen)
