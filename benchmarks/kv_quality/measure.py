"""Measures all caches of one model on several processes."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.kv_quality.cache_cases import BASE, CacheCase, unit
from benchmarks.kv_quality.forced_run import TurnPlan
from benchmarks.kv_quality.proof_models import ProofModel
from benchmarks.kv_quality.scores import CaseScores
from benchmarks.kv_quality.worker import NamedScales, Worker, load_worker
from memopt.kernels.kv_formats import KvFormatName

# The worker of this process, where it is one of a pool.
_WORKERS: list[Worker] = []


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """`turns` of every case. `modes_end`: the turn up to which other modes are compared, once for each format."""

    turns: TurnPlan
    modes_end: int


@dataclass(frozen=True, slots=True)
class ModelResult:
    """`cases`: the base first. `compared_rows`: format -> rows that came out with the same bits in all modes."""

    plan: MeasurePlan
    cases: tuple[CaseScores, ...]
    compared_rows: Mapping[KvFormatName, int]


def measure(proof: ProofModel, plan: MeasurePlan, num_processes: int) -> ModelResult:
    """Run and score every case; the processes have one thread each. Raises DifferentBitsError when modes differ."""
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(num_processes, context, _start, (proof, plan.turns)) as pool,
    ):
        calibration = pool.submit(_calibrate)
        cases = pool.submit(_cases).result()
        paths = {case: Path(name, f"{number}.pt") for number, case in enumerate(cases)}
        modes = {case.kv_cache: case for case in reversed(cases)}
        futures: dict[CacheCase, Future[int]] = {}
        # Those that wait for the calibration go last.
        for case in sorted(cases, key=lambda case: case.rule is not unit):
            scales: NamedScales = () if case.rule is unit else calibration.result()
            modes_end = plan.modes_end if modes[case.kv_cache] is case else None
            futures[case] = pool.submit(_record, case, scales, paths[case], modes_end)
        compared = {case.kv_cache: futures[case].result() for case in futures if modes[case.kv_cache] is case}
        for future in futures.values():
            future.result()
        scores = [pool.submit(_score, case.name, paths[BASE], paths[case]) for case in cases]
        return ModelResult(plan, tuple(score.result() for score in scores), compared)


def _start(proof: ProofModel, turns: TurnPlan) -> None:
    torch.set_num_threads(1)
    _WORKERS.append(load_worker(proof, turns))


def _cases() -> tuple[CacheCase, ...]:
    return _WORKERS[0].cases


def _calibrate() -> NamedScales:
    return _WORKERS[0].calibrate()


def _record(case: CacheCase, scales: NamedScales, path: Path, modes_end: int | None) -> int:
    start = time.process_time()
    num_compared = _WORKERS[0].record(case, scales, path, modes_end)
    print(f"{case.name}: {time.process_time() - start:.0f} s of processor time", file=sys.stderr, flush=True)
    return num_compared


def _score(name: str, base: Path, path: Path) -> CaseScores:
    return _WORKERS[0].score(name, base, path)
