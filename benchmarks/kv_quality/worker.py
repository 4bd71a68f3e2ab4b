"""What one process does of a measurement: it loads a model once; hidden states go to files and come from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kv_quality.cache_cases import CacheCase, cases_for, with_own_memory
from benchmarks.kv_quality.calibration import calibrated_scales
from benchmarks.kv_quality.changed_pools import lose_scales, with_exact_indexer
from benchmarks.kv_quality.forced_run import HiddenRows, TurnPlan, forced_run
from benchmarks.kv_quality.modes import compare_modes
from benchmarks.kv_quality.proof_models import ProofModel
from benchmarks.kv_quality.scores import CaseScores, score_case
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.verified_model import VerifiedModel, load_verified
from memopt.runtime.kv.kv_scales import kv_scales_of
from memopt.runtime.parallel.communicator import SingleRank

# Scales as a release names them.
NamedScales = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Worker:
    """A verified model and what it is to read; documents have one token more than the last turn's end."""

    model: VerifiedModel
    proof: ProofModel
    turns: TurnPlan

    @property
    def cases(self) -> tuple[CacheCase, ...]:
        """The caches that the model can have, the base first."""
        return cases_for(self.model.decoder.config.attention)

    def calibrate(self) -> NamedScales:
        """Scales of the calibration texts."""
        return tuple(calibrated_scales(self.model.decoder, self.proof.calibration).tensors())

    def record(self, case: CacheCase, calibrated: NamedScales, path: Path, modes_end: int | None) -> int:
        """Run a case turn by turn and write its HiddenRows to `path`.

        `modes_end`: the end of the turn to which the first document is run in other modes, which must give the same
        bits (DifferentBitsError); returns how many rows were compared.
        """
        scales = with_own_memory(case.rule(kv_scales_of(self.model.decoder.config, calibrated)))
        rows = forced_run(
            self.model, case.kv_cache, scales, self.proof.documents, self.turns,
            place=with_exact_indexer if case.has_exact_indexer else None,
            after_first_turn=lose_scales if case.loses_scales else None,
        )  # fmt: skip
        torch.save((rows.prompt, rows.answer), path)
        if modes_end is None:
            return 0
        return compare_modes(self.model, case.kv_cache, scales, self.proof.documents[0], self.turns, modes_end, rows)

    def score(self, name: str, base: Path, path: Path) -> CaseScores:
        """Scores of a recorded case against the recorded base."""
        kept, rows = (HiddenRows(*torch.load(file, weights_only=True)) for file in (base, path))
        return score_case(name, self.model.decoder, kept, rows, self.proof.documents, self.turns)


def load_worker(proof: ProofModel, turns: TurnPlan) -> Worker:
    """Verify the release and load it in float32."""
    model = load_verified(proof.folder, None, proof.key, EngineOptions(dtype="float32"), SingleRank())
    return Worker(model, proof, turns)
