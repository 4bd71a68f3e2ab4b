"""One process that measures: it loads a model once and then takes jobs. Hidden states go to files and come from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kv_quality.cache_cases import CacheCase, with_own_memory
from benchmarks.kv_quality.calibration import calibrated_scales
from benchmarks.kv_quality.forced_run import Document, HiddenRows, TurnPlan, forced_run
from benchmarks.kv_quality.modes import compare_modes, lose_scales
from benchmarks.kv_quality.proof_models import ProofModel
from benchmarks.kv_quality.scores import CaseScores, score_case
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.verified_model import VerifiedModel, load_verified
from memopt.runtime.kv.kv_scales import kv_scales_of
from memopt.runtime.model.model_config import MlaConfig
from memopt.runtime.parallel.communicator import SingleRank

# Texts that scales are calibrated with, and what is read of each.
CALIBRATION_TEXTS, CALIBRATION_TOKENS = 4, 512

# Scales as a release names them.
NamedScales = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Worker:
    """A verified model and the tokens of its texts; documents have one token more than the last turn's end."""

    model: VerifiedModel
    documents: tuple[Document, ...]
    calibration: tuple[Document, ...]
    turns: TurnPlan

    @property
    def is_mla(self) -> bool:
        """Whether the cache holds latents."""
        return isinstance(self.model.decoder.config.attention, MlaConfig)

    def calibrate(self) -> NamedScales:
        """Scales of the calibration texts."""
        return tuple(calibrated_scales(self.model.decoder, self.calibration).tensors())

    def record(self, case: CacheCase, calibrated: NamedScales, path: Path, modes_end: int | None) -> int:
        """Run a case turn by turn and write its HiddenRows to `path`.

        `modes_end`: the end of the turn to which the first document is run in other modes, which must give the same
        bits (DifferentBitsError); returns how many rows were compared.
        """
        scales = with_own_memory(case.rule(kv_scales_of(self.model.decoder.config, calibrated)))
        spoil = lose_scales if case.loses_scales else None
        rows = forced_run(
            self.model, case.kv_cache, scales, self.documents, self.turns, after_first_turn=spoil
        )
        torch.save((rows.prompt, rows.answer), path)
        if modes_end is None:
            return 0
        return compare_modes(self.model, case.kv_cache, scales, self.documents[0], self.turns, modes_end, rows)

    def score(self, name: str, base: Path, path: Path) -> CaseScores:
        """Scores of a recorded case against the recorded base."""
        rows = [HiddenRows(*torch.load(file, weights_only=True)) for file in (base, path)]
        return score_case(name, self.model.decoder, *rows, self.documents, self.turns)


def load_worker(proof: ProofModel, turns: TurnPlan) -> Worker:
    """Verify and load the release in float32, and cut the texts with its own tokenizer."""
    model = load_verified(proof.folder, None, proof.key, EngineOptions(dtype="float32"), SingleRank())
    if model.tokenizer is None:
        raise SystemExit(f"{proof.folder} has no tokenizer")
    encode = model.tokenizer.encode
    num_tokens = turns.ends[-1] + 1
    documents: list[Document] = []
    for group in proof.held_out:
        long_enough: Iterator[Document] = (ids[:num_tokens] for ids in map(encode, group.texts) if len(ids) >= num_tokens)
        found = list(islice(long_enough, group.count))
        if len(found) < group.count:
            raise SystemExit(f"{len(found)} texts have {num_tokens} tokens, {group.count} are needed")
        documents += found
    calibration = [encode(text)[:CALIBRATION_TOKENS] for text in proof.calibration[:CALIBRATION_TEXTS]]
    return Worker(model, tuple(documents), tuple(calibration), turns)
