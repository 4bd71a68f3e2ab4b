"""Wrong scales are wrong in the way that their names say; which model can have which cache."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from benchmarks.kv_quality.cache_cases import (
    BASE,
    CASES,
    calibrated,
    cases_for,
    other_layers,
    too_large,
    too_small,
    unit,
    with_own_memory,
)
from memopt.runtime.kv.kv_scales import KvScales, LayerScales
from memopt.runtime.model.model_config import GqaConfig, IndexerConfig, MlaConfig

SCALES = KvScales(
    MappingProxyType(
        {
            0: LayerScales(torch.tensor([0.5, 0.25]), torch.tensor(2.0)),
            1: LayerScales(torch.tensor(3.0), None),
            2: LayerScales(torch.tensor(5.0), torch.tensor(7.0)),
        }
    )
)
MLA = MlaConfig(8, None, 128, 32, 16, 32, 0.1)
INDEXER = IndexerConfig(4, 32, 256, (True,))


def test_rules() -> None:
    assert calibrated(SCALES) is SCALES
    assert not unit(SCALES).layers
    assert too_small(SCALES).of_layer(0).k.tolist() == [0.5 / 16, 0.25 / 16]
    assert too_large(SCALES).of_layer(2).v == 7 * 16
    assert too_large(SCALES).of_layer(1).v is None
    swapped = other_layers(SCALES)
    assert [float(swapped.of_layer(layer).k.max()) for layer in range(3)] == [5, 3, 0.5]


def test_spoiled_scales_are_nobody_elses() -> None:
    own = with_own_memory(SCALES)
    own.of_layer(1).k.fill_(1)
    assert SCALES.of_layer(1).k == 3


def test_models_have_the_caches_that_hold_them() -> None:
    assert CASES[0] is BASE
    assert cases_for(replace(MLA, indexer=INDEXER)) == CASES
    assert {case.name for case in CASES} - {case.name for case in cases_for(MLA)} == {"bf16, indexer keys fp32"}
    gqa = cases_for(GqaConfig(9, 3, 64, False, False, 0.125))
    assert {case.name for case in CASES} - {case.name for case in gqa} == {"fp8_ds_mla", "bf16, indexer keys fp32"}
