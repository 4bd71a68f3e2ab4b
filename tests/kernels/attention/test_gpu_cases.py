"""The GPU benchmark's attention cases, small and on the CPU: their data, checks and peers hold together."""

from __future__ import annotations

import pytest
from decode_cases import GQA_FORMATS, MLA_FORMATS, generator, poisoned

from benchmarks.gpu.case import Prepared
from benchmarks.gpu.cases_attention import cases, prepare_gqa, prepare_indexer, prepare_mla, prepare_top_k
from memopt.kernels.kv_formats import FP8_DS_MLA, KvFormat


def _runs(prepared: Prepared) -> None:
    for output in prepared.outputs:
        poisoned(output)
    assert not prepared.check() <= prepared.tolerance  # the poison must not pass
    prepared.run()
    assert prepared.check() <= prepared.tolerance
    for peer in prepared.peers.values():
        peer()


@pytest.mark.parametrize("kv_format", MLA_FORMATS, ids=lambda kv_format: kv_format.name)
def test_mla(kv_format: KvFormat) -> None:
    prepared = prepare_mla(kv_format, 8, 2, 100, 2, generator(0))
    _runs(prepared)
    assert prepared.bytes_moved == 200 * kv_format.mla_token_bytes + 2 * 8 * (512 + 64 + 512) * 2


def test_sparse_mla() -> None:
    _runs(prepare_mla(FP8_DS_MLA, 8, 2, 100, 1, generator(0), num_selected=40))


@pytest.mark.parametrize("kv_format", GQA_FORMATS, ids=lambda kv_format: kv_format.name)
def test_gqa(kv_format: KvFormat) -> None:
    _runs(prepare_gqa(kv_format, 12, 128, 2, 100, 2, generator(0)))


def test_indexer_and_top_k() -> None:
    _runs(prepare_indexer(32, 2, 100, generator(0)))
    _runs(prepare_top_k(20, 2, 1000, generator(0)))


def test_names_are_distinct() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) > 0
