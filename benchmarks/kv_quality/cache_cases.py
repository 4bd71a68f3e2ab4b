"""The KV caches that are compared: a format, and the scales of an fp8_e4m3 one, right or wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from memopt.kernels.kv_formats import KvFormatName, kv_format
from memopt.runtime.kv.kv_scales import UNIT_KV_SCALES, KvScales, LayerScales
from memopt.runtime.model.model_config import GqaConfig, MlaConfig

# Makes the scales of a case from the calibrated ones.
ScaleRule = Callable[[KvScales], KvScales]
# How far the wrong scales are off.
WRONG_FACTOR = 16.0


def unit(_: KvScales) -> KvScales:
    """1 everywhere: what an engine takes without scales in the release."""
    return UNIT_KV_SCALES


def calibrated(scales: KvScales) -> KvScales:
    """As calibration found them."""
    return scales


def too_large(scales: KvScales) -> KvScales:
    """All scales times WRONG_FACTOR: small values sink below e4m3's smallest."""
    return _changed(scales, lambda scale: scale * WRONG_FACTOR)


def too_small(scales: KvScales) -> KvScales:
    """All scales divided by WRONG_FACTOR: large values saturate."""
    return _changed(scales, lambda scale: scale / WRONG_FACTOR)


def other_layers(scales: KvScales) -> KvScales:
    """The first layer has the last one's scales, and so on."""
    order = sorted(scales.layers)
    swapped = {layer: scales.layers[other] for layer, other in zip(order, reversed(order), strict=True)}
    return KvScales(MappingProxyType(swapped))


@dataclass(frozen=True, slots=True)
class CacheCase:
    """One line of the tables. `rule`: of formats with scales of a layer.

    `loses_scales`: after the first turn the engine reads and writes under unit scales what it wrote under the others.
    `has_exact_indexer`: DSA's indexer keys are float32, as no engine has them, instead of FP8.
    """

    name: str
    kv_cache: KvFormatName
    rule: ScaleRule = unit
    loses_scales: bool = False
    has_exact_indexer: bool = False


# What the others are compared with.
BASE = CacheCase("bf16", "bf16")
CASES: tuple[CacheCase, ...] = (
    BASE,
    CacheCase("fp32", "fp32"),
    CacheCase("bf16, indexer keys fp32", "bf16", has_exact_indexer=True),
    CacheCase("fp8_ds_mla", "fp8_ds_mla"),
    CacheCase("fp8_e4m3, calibrated", "fp8_e4m3", calibrated),
    CacheCase("fp8_e4m3, unit", "fp8_e4m3"),
    CacheCase("fp8_e4m3, scales / 16", "fp8_e4m3", too_small),
    CacheCase("fp8_e4m3, scales x 16", "fp8_e4m3", too_large),
    CacheCase("fp8_e4m3, other layers' scales", "fp8_e4m3", other_layers),
    CacheCase("fp8_e4m3, scales lost after turn 1", "fp8_e4m3", calibrated, loses_scales=True),
)


def cases_for(attention: MlaConfig | GqaConfig) -> tuple[CacheCase, ...]:
    """Those that a model with this attention can have."""
    is_mla = isinstance(attention, MlaConfig)
    has_indexer = isinstance(attention, MlaConfig) and attention.indexer is not None
    return tuple(
        case
        for case in CASES
        if (is_mla or kv_format(case.kv_cache).has_gqa) and (has_indexer or not case.has_exact_indexer)
    )


def with_own_memory(scales: KvScales) -> KvScales:
    """The same scales in tensors that nobody else has: an engine keeps them, and a test may spoil them."""
    return _changed(scales, lambda scale: scale.clone())


def _changed(scales: KvScales, change: Callable[[Tensor], Tensor]) -> KvScales:
    layers = {
        layer: LayerScales(change(found.k), None if found.v is None else change(found.v))
        for layer, found in scales.layers.items()
    }
    return KvScales(MappingProxyType(layers))
