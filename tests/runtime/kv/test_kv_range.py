"""Ranges of keys and values while a model runs: exact maxima, percentiles, and scales that make a cache better."""

from __future__ import annotations

import pytest
import torch
from attention_steps import PagedSequences, Part
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers_attention import deepseek_pair, glm4_pair, hidden_states

from memopt.errors import UsageError
from memopt.kernels.kv_formats import BF16, FP8_E4M3, FP32
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.kv_range import HeadMagnitudes, KvRange
from memopt.runtime.kv.kv_scales import KvScales
from memopt.runtime.kv.layer_kv import GqaLayerKv
from memopt.runtime.model.rope import RotaryTable

TOKENS = 90
STEPS = [[Part(0, 0, 50, True)], [Part(0, 50, TOKENS, False)]]


@settings(max_examples=30, deadline=None)
@given(
    parts=st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40), min_size=1, max_size=4),
    percentile=st.floats(0.5, 100.0),
)
def test_a_bound_covers_its_percentile(parts: list[list[float]], percentile: float) -> None:
    seen = HeadMagnitudes()
    for part in parts:
        values = torch.tensor(part)
        seen.add(torch.stack((values, values * 3), dim=0).T[..., None])
    values = torch.tensor([value for part in parts for value in part]).abs().sort().values
    for head, factor in enumerate((1, 3)):
        exact = float(values[max(0, -(-int(len(values) * percentile) // 100) - 1)]) * factor
        bound = float(seen.bound(percentile)[head])
        assert exact * 0.999 <= bound
        assert bound <= float(values[-1]) * factor * 1.001
        covered = float((values * factor <= bound).float().mean())
        assert covered * 100 >= percentile - 1e-3
    assert seen.bound(100.0).tolist() == pytest.approx([float(values[-1]), float(values[-1]) * 3])


def test_bins_are_narrow() -> None:
    seen = HeadMagnitudes()
    seen.add(torch.linspace(1.0, 1000.0, 10_000)[:, None, None])
    for percentile in (1.0, 50.0, 99.0):
        exact = 1 + 999 * percentile / 100
        assert exact <= float(seen.bound(percentile)) * 1.001
        assert float(seen.bound(percentile)) <= exact * 1.017


def gqa_layer(kv_range: KvRange | None, scales: KvScales | None = None, fmt: str = "fp32") -> torch.Tensor:
    """Outputs of a GQA layer whose values are far from 1."""
    pair = glm4_pair()
    with torch.no_grad():
        pair.module.v_proj.weight.mul_(0.004)
        pair.module.v_proj.bias.mul_(0.004)
    sequences = PagedSequences(hidden_states([TOKENS]))
    kv_format = {"fp32": FP32, "bf16": BF16, "fp8_e4m3": FP8_E4M3}[fmt]
    pools = new_kv_pools(
        pair.config, kv_format, sequences.num_pages, num_layers=1, num_kv_heads_here=2, scales=scales,
        kv_range=kv_range,
    )  # fmt: skip
    layer = pools.layers[0]
    assert isinstance(layer, GqaLayerKv)
    outputs, _ = sequences.run(pair.block(), layer, RotaryTable(pair.config.rope), STEPS, padding=2)
    if kv_range is not None:
        # What was observed is what is in the pages: padding rows have no part in it.
        for seen, pool in ((kv_range.layers[0].key, layer.key_pool), (kv_range.layers[0].value, layer.value_pool)):
            assert seen.largest is not None
            assert torch.equal(seen.largest, pool.abs().amax(dim=(0, 1, 3)))
            assert seen.counts is not None
            assert seen.counts.sum(dim=1).tolist() == [TOKENS * 64] * 2
    return outputs[0]


def test_calibrated_scales_beat_unit_ones() -> None:
    kv_range = KvRange()
    exact = gqa_layer(kv_range)
    scales = kv_range.scales()
    assert scales.of_layer(0).k.shape == (2,)
    errors = [float((gqa_layer(None, item, "fp8_e4m3") - exact).norm() / exact.norm()) for item in (scales, None)]
    assert errors[0] < 0.06
    assert errors[0] < errors[1] / 2


def test_mla_has_one_scale_of_latent_and_rope() -> None:
    pair, sequences, kv_range = deepseek_pair(), PagedSequences(hidden_states([TOKENS])), KvRange()
    pools = new_kv_pools(pair.config, FP32, sequences.num_pages, num_layers=1, num_kv_heads_here=1, kv_range=kv_range)
    sequences.run(pair.block(), pools.layers[0], RotaryTable(pair.config.rope), STEPS)
    scales = kv_range.scales().of_layer(0)
    stored = pools.layers[0].pool  # type: ignore[union-attr]
    assert scales.v is None
    assert float(scales.k) == pytest.approx(float(stored.abs().max()) / 448)
    assert float(kv_range.scales(99.0).of_layer(0).k) < float(scales.k)


def test_refusals() -> None:
    with pytest.raises(UsageError, match="percentile is 0"):
        KvRange().scales(0)
    empty = KvRange()
    empty.of_layer(0)
    with pytest.raises(UsageError, match="no keys or values were observed"):
        empty.scales()
    broken = KvRange()
    broken.of_layer(4).observe(torch.tensor([[[1.0, torch.inf]]]), None, torch.tensor([0]))
    with pytest.raises(UsageError, match="layer 4 computed keys or values that are not finite"):
        broken.scales(50.0)


def test_zeros_have_a_unit_scale() -> None:
    zeros = KvRange()
    zeros.of_layer(0).observe(torch.zeros(2, 1, 3), None, torch.tensor([0, 1]))
    assert float(zeros.scales().of_layer(0).k) == 1.0
