"""The same document in other modes: in one shot, and in chunks, without turns."""

from __future__ import annotations

from benchmarks.kv_quality.forced_run import (
    DifferentBitsError,
    HiddenRows,
    TurnPlan,
    forced_run,
    same_bits,
)
from benchmarks.kv_quality.proof_models import Document
from memopt.runtime.engine.verified_model import VerifiedModel
from memopt.runtime.kv.kv_scales import KvScales

# Not whole pages, and not the turns' chunks.
CHUNK_ROWS = 200


def compare_modes(
    model: VerifiedModel,
    kv_cache: str,
    scales: KvScales,
    document: Document,
    turns: TurnPlan,
    end: int,
    rows: HiddenRows,
) -> int:
    """Run `document`, the first of `rows`, to `end`, one of the turns' ends, as one request without a prefix cache.

    Once with the prompt in one step and once in chunks. Returns how many rows were compared with those of the turns;
    DifferentBitsError names the mode in which any bit of any row differs.
    """
    prompt, answer = slice(0, end - turns.answer_tokens), slice(end - turns.answer_tokens, end - 1)
    num_rows = 0
    for mode, chunk_rows in (("one shot", end), ("chunks", CHUNK_ROWS)):
        plan = TurnPlan((end,), turns.answer_tokens, chunk_rows, reuses_pages=False)
        found = forced_run(model, kv_cache, scales, (document,), plan)
        for own, other, place in ((found.prompt, rows.prompt, prompt), (found.answer, rows.answer, answer)):
            is_same = same_bits(own[0, place], other[0, place])
            if not bool(is_same.all()):
                raise DifferentBitsError(
                    f"{kv_cache}: {int((~is_same).sum())} of {len(is_same)} rows differ between {mode} and turns"
                )
            num_rows += len(is_same)
    return num_rows
