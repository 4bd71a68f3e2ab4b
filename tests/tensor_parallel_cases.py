"""What each rank of a tensor-parallel group runs in tests, on the release of the trained example."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memopt.runtime.engine.engine import Engine
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.indexer import Indexer
from memopt.runtime.parallel.launch import communicator_from_environment

# The first prompt is longer than the model's index_topk of 256: its rows select.
PROMPTS = ([(7 * number) % 2000 + 1 for number in range(270)], [5, 6, 7], [11] * 66)
NUM_TOKENS = 6
TIMEOUT_SECONDS = 60.0


@dataclass
class Findings:
    """Of one rank: tokens of PROMPTS, the sampled rows' logits step by step, and what its indexers selected."""

    tokens: list[tuple[int, ...]] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    selections: list[np.ndarray] = field(default_factory=list)
    ends: list[tuple[str | None, tuple[int, ...]]] = field(default_factory=list)
    num_mismatches: int = 0


class Recorder:
    """A decoder that notes logits."""

    def __init__(self, decoder: Decoder, findings: Findings) -> None:
        self._decoder = decoder
        self._findings = findings

    def forward(self, rows: Any, pools: Any) -> Tensor:
        return self._decoder.forward(rows, pools)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self._decoder.logits(hidden)
        self._findings.logits.append(logits.numpy().copy())
        return logits


def observe(engine: Engine, findings: Findings) -> None:
    """Note the engine's logits and selections, every rank's own, which are compared with rank 0's as well."""
    decoder = engine.core._runner._model
    assert isinstance(decoder, Decoder)
    for layer in decoder.layers:
        indexer: Indexer | None = layer.attention.indexer  # type: ignore[attr-defined]
        if indexer is not None:
            assert indexer.checks_ranks
    original = Indexer._select

    def select(self: Indexer, *arguments: Any) -> Tensor:
        chosen = original(self, *arguments)
        findings.selections.append(chosen.numpy().copy())
        return chosen

    Indexer._select = select  # type: ignore[method-assign]
    engine.core._runner._model = Recorder(decoder, findings)


def run_one_rank(folder: Path, key: Path, num_ranks: int) -> Findings:
    """Generate, then generate again with a page of the second request taken away on the last rank alone."""
    communicator = communicator_from_environment(num_ranks, timeout_seconds=TIMEOUT_SECONDS)
    findings = Findings()
    original = Indexer._select
    with Engine(
        folder, key=key, dtype="float32", kv_cache="fp32", integrity="tagged", tensor_parallel=num_ranks,
        communicator=communicator, num_pages=40, max_requests=4, max_step_tokens=128,
    ) as engine:  # fmt: skip
        observe(engine, findings)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        findings.tokens = [answer.token_ids for answer in engine.generate(PROMPTS, params)]
        Indexer._select = original  # type: ignore[method-assign]
        requests = [engine.submit(prompt, params) for prompt in PROMPTS]
        tokens: dict[int, list[int]] = {request: [] for request in requests}
        reasons: dict[int, str | None] = {}
        is_injected = False
        while engine.has_work:
            for event in engine.step():
                if event.token_id is not None:
                    tokens[event.request_id].append(event.token_id)
                reasons[event.request_id] = event.finish_reason
            if not is_injected and all(len(found) >= 2 for found in tokens.values()):
                is_injected = True
                if communicator.rank == num_ranks - 1:
                    victim = next(one for one in engine.core.scheduler.running if one.tokens[:3] == PROMPTS[1])
                    tracker = engine.core.pages.tracker
                    assert isinstance(tracker, TaggedTracker)
                    tracker.tags[victim.pages[0].page] += 1
        findings.ends = [(reasons[request], tuple(tokens[request])) for request in requests]
        findings.num_mismatches = engine.metrics().integrity.num_mismatches
        engine.core.pages.check()
    return findings


def open_with_keys(folder: Path, keys: list[Path]) -> str:
    """Open the release on each rank with a key of its own; says so if an engine came to be."""
    rank = int(os.environ["RANK"])
    communicator = communicator_from_environment(len(keys), timeout_seconds=TIMEOUT_SECONDS)
    with Engine(folder, key=keys[rank], tensor_parallel=len(keys), communicator=communicator, num_pages=4):
        return "an engine"


def one_rank_alone(folder: Path, key: Path) -> Findings:
    """The same on the hub files, without ranks."""
    torch.set_num_threads(1)
    return run_one_rank(folder, key, 1)
