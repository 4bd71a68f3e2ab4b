"""The speed model: bytes and FLOPs counted by hand on a tiny model, and which resource binds on real ones."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import CONFIGS
from tiny_plans import checkpoint_of, plan_of, tiny

from memopt.compressor.capacity.capacity_plan import plan_capacity, plan_weights
from memopt.compressor.capacity.gpus import GPUS, Gpu, gpu_named
from memopt.compressor.capacity.kv_bytes import CacheFormat, token_bytes
from memopt.compressor.capacity.kv_crossover import last_length, shortest_length
from memopt.compressor.capacity.model_shape import model_shape
from memopt.compressor.capacity.request import CapacityRequest
from memopt.compressor.capacity.speed import SpeedBound
from memopt.compressor.capacity.throughput import RankModel, Workload, decode_step, prefill, touched_share
from memopt.compressor.families.roles import Role
from memopt.compressor.plan import Plan
from memopt.errors import ConfigError

UNIT = Gpu("unit", 2**40, bandwidth_bytes_per_second=1e9, bf16_flops=1e12)


def model_of(name: str, recipe: str, form: CacheFormat, *, num_ranks: int = 1, **changes: Any) -> RankModel:
    checkpoint = tiny(name, **changes)
    shape = model_shape(checkpoint.config)
    weights = plan_weights(plan_of(checkpoint, recipe, tensor_parallel=num_ranks))
    token = token_bytes(shape, form, num_ranks=num_ranks)
    return RankModel(shape, shape.experts_per_token or 0, weights, token, is_mtp_on=False, has_absorbed_copies=True)


def test_the_share_of_experts_that_tokens_touch() -> None:
    assert touched_share(8, 256, 1) == 8 / 256
    assert touched_share(2, 4, 2) == 0.75
    assert touched_share(8, 256, 10**6) == 1.0


@given(st.integers(1, 64), st.integers(0, 8), st.integers(1, 2000))
def test_more_tokens_touch_more_experts(k: int, log_spare: int, tokens: int) -> None:
    num_experts = k * 2**log_spare
    share = touched_share(k, num_experts, tokens)
    assert k / num_experts <= share <= touched_share(k, num_experts, tokens + 1) <= 1
    assert share <= tokens * k / num_experts


def test_a_decode_step_of_a_tiny_glm_counted_by_hand() -> None:
    model = model_of("glm-5.2-fp8", "dequantize", CacheFormat.FP8_DS_MLA)
    step = decode_step(model, UNIT, Workload(2, 1000))
    # Two MoE layers, three of four experts (top 2, two requests), three matrices of 256 x 256 in BF16.
    assert step.expert_bytes == 2 * 3 * 3 * 256 * 256 * 2
    # Per request: three layers, 256 of 1,000 tokens, 128 latent + 4 scale + 32 rope bytes; two indexers, 32 + 4 bytes.
    assert step.kv_bytes == 2 * (3 * 256 * (128 + 4 + 32) + 2 * 1000 * 36)
    rows = {(row.role, row.is_mtp): row.rank_size_bytes for row in model.weights.rows}
    unread = rows[Role.EMBEDDING, False] + rows[Role.KV_B, False] + rows[Role.ROUTED_EXPERT, False]
    read = model.weights.size_bytes(is_mtp_on=False) - unread + model.weights.absorbed_bytes
    assert step.other_weight_bytes == read
    assert step.memory_seconds == pytest.approx((step.expert_bytes + read + step.kv_bytes) / 1e9)
    linear = sum(
        row.rank_elements * (2 / 4 if row.role is Role.ROUTED_EXPERT else 1)
        for row in model.weights.kept(is_mtp_on=False)
        if row.role is not Role.EMBEDDING
    )
    attention = 3 * 8 * (144 + 128) * 256 + 2 * 4 * 32 * 1000
    assert step.flops == 2 * 2 * (linear + attention)
    assert step.compute_seconds == pytest.approx(step.flops / 1e12)


def test_a_prefill_of_a_tiny_kimi_counted_by_hand() -> None:
    model = model_of("kimi-k2-instruct-fp8", "dequantize", CacheFormat.BF16)
    bound = prefill(model, UNIT, 100, 64)
    # Two chunks, the second of which reads the cache of the first: 3 layers of 144 BF16 elements.
    assert bound.kv_bytes == 64 * 3 * 144 * 2
    rows = model.weights.kept(is_mtp_on=False)
    linear = sum(
        row.rank_elements * {Role.ROUTED_EXPERT: 50, Role.LM_HEAD: 1, Role.EMBEDDING: 0}.get(row.role, 100)
        for row in rows
    )
    # Causal pairs, 8 heads, 32 + 16 + 32 elements.
    assert bound.flops == 2 * (linear + 3 * 8 * 80 * 5050)


def test_the_last_chunk_of_a_prefill_touches_the_experts_of_its_own_tokens() -> None:
    model = model_of("kimi-k2-instruct-fp8", "dequantize", CacheFormat.BF16)
    one, both, short = (prefill(model, UNIT, length, 64) for length in (64, 65, 1))
    assert both.expert_bytes == one.expert_bytes + short.expert_bytes
    # One token touches two of four experts, 64 tokens practically all.
    assert short.expert_bytes < 0.6 * one.expert_bytes
    assert both.other_weight_bytes == 2 * one.other_weight_bytes


def test_a_sparse_prefill_reads_the_caches_of_the_indexers_that_there_are() -> None:
    # Charged on three layers, read on the two that own an indexer: as decode counts it.
    bound = prefill(model_of("glm-5.2-fp8", "dequantize", CacheFormat.BF16), UNIT, 100, 64)
    assert bound.kv_bytes == 64 * (3 * 144 * 2 + 2 * 36)


def test_the_indexer_scores_in_fp8() -> None:
    model = model_of("glm-5.2-fp8", "dequantize", CacheFormat.BF16)
    slow, fast = (prefill(model, gpu, 1000, 8192) for gpu in (UNIT, replace(UNIT, fp8_flops=2e12)))
    assert slow.flops == fast.flops
    assert slow.compute_seconds is not None
    assert fast.compute_seconds is not None
    # Two indexers of four heads, 32 elements, 500,500 causal pairs: at twice the rate a half of their time is saved.
    assert slow.compute_seconds - fast.compute_seconds == pytest.approx(2 * 2 * 4 * 32 * 500_500 / 2e12)


def test_sparse_prefill_attends_to_the_top_k() -> None:
    short, long = (
        prefill(model_of("glm-5.2-fp8", "dequantize", CacheFormat.BF16, index_topk=top), UNIT, 1000, 8192).flops
        for top in (100, 1000)
    )
    pairs = {100: 5050 + 900 * 100, 1000: 500_500}
    assert long - short == 2 * 3 * 8 * (144 + 128) * (pairs[1000] - pairs[100])


def test_ranks_share_the_work() -> None:
    one, two = (model_of("glm-4.7-fp8", "glm-4.7-int4", CacheFormat.FP8_E4M3, num_ranks=n) for n in (1, 2))
    whole, half = (decode_step(model, UNIT, Workload(4, 500)) for model in (one, two))
    assert half.kv_bytes * 2 == whole.kv_bytes
    assert whole.flops / 2 < half.flops < whole.flops
    assert half.expert_bytes == pytest.approx(whole.expert_bytes / 2, rel=0.01)


def test_fp8_weights_run_at_the_fp8_rate_where_there_is_one() -> None:
    model = model_of("glm-4.7-fp8", "copy", CacheFormat.BF16)
    with_fp8 = replace(UNIT, fp8_flops=2e12)
    slow, fast = (prefill(model, gpu, 256, 8192).compute_seconds for gpu in (UNIT, with_fp8))
    assert slow is not None
    assert fast is not None
    assert slow / 2 < fast < 0.75 * slow


def test_without_rates_nothing_is_claimed() -> None:
    model = model_of("glm-4.7-fp8", "glm-4.7-int4", CacheFormat.FP8_E4M3)
    step = decode_step(model, Gpu("given", 2**37), Workload(4, 500))
    assert (step.memory_seconds, step.compute_seconds, step.seconds, step.binds) == (None, None, None, None)
    with_bandwidth = decode_step(model, Gpu("given", 2**37, 1e12), Workload(4, 500))
    assert with_bandwidth.seconds == with_bandwidth.memory_seconds
    assert with_bandwidth.binds is None


def test_of_an_mtp_layers_own_embedding_no_more_than_rows_are_read() -> None:
    model = model_of("glm-4.7-fp8", "glm-4.7-int4", CacheFormat.FP8_E4M3)
    off, on = (decode_step(replace(model, is_mtp_on=is_on), UNIT, Workload(1, 64)) for is_on in (False, True))
    mtp = sum(row.rank_size_bytes for row in model.weights.rows if row.is_mtp and row.role is not Role.ROUTED_EXPERT)
    assert on.other_weight_bytes - off.other_weight_bytes == mtp - 512 * 256 * 2


def test_a_tied_embedding_is_read_as_the_head() -> None:
    tied = model_of("glm-4.7-fp8", "glm-4.7-int4", CacheFormat.FP8_E4M3, tie_word_embeddings=True)
    apart = model_of("glm-4.7-fp8", "glm-4.7-int4", CacheFormat.FP8_E4M3)
    bound_tied, bound_apart = (decode_step(model, UNIT, Workload(1, 64)) for model in (tied, apart))
    assert bound_tied.other_weight_bytes == bound_apart.other_weight_bytes
    assert bound_tied.flops == bound_apart.flops
    assert prefill(tied, UNIT, 100, 64).flops == prefill(apart, UNIT, 100, 64).flops


def test_mtp_reads_its_layer_too() -> None:
    model = model_of("glm-5.2-fp8", "glm-5.2-int4", CacheFormat.FP8_DS_MLA)
    on_token = token_bytes(model.shape, CacheFormat.FP8_DS_MLA, is_mtp_on=True)
    with_mtp = replace(model, is_mtp_on=True, token=on_token)
    off, on = (decode_step(either, UNIT, Workload(1, 64)) for either in (model, with_mtp))
    # Three MoE layers for two; a token and its draft touch three of four experts, not two.
    assert on.expert_bytes == pytest.approx(1.5 * 1.5 * off.expert_bytes, abs=1)
    assert on.other_weight_bytes > off.other_weight_bytes
    # Both tokens read the cache together, of four layers and three indexers for three and two.
    assert (off.kv_bytes, on.kv_bytes) == (64 * (3 * 164 + 2 * 36), 64 * (4 * 164 + 3 * 36))
    # Twice the tokens, in more layers.
    assert on.flops > 2 * off.flops


def test_with_mtp_a_step_yields_a_draft_more_at_most(kimi: Plan) -> None:
    plan = plan_of(tiny("glm-5.2-fp8"), "glm-5.2-int4")
    off, on = (speed(plan, 4, 1024, is_mtp_on=is_on) for is_on in (False, True))
    for bound, number in ((off, 4), (on, 8)):
        assert bound.step.seconds is not None
        assert bound.tokens_per_second == pytest.approx(number / bound.step.seconds)
    # A model without MTP layers has no draft.
    assert speed(kimi, 4, 1024, is_mtp_on=True) == speed(kimi, 4, 1024)


@pytest.fixture(scope="module")
def kimi() -> Plan:
    """Kimi K2.6 with its true widths and 48 experts."""
    table = json.loads((CONFIGS / "kimi-k2.6-int4.json").read_text())
    table["text_config"]["n_routed_experts"] = 48
    return plan_of(checkpoint_of(table), "kimi-k2.6", tensor_parallel=8)


def speed(plan: Plan, requests: int, context: int, **request: Any) -> SpeedBound:
    asked = CapacityRequest(gpu=gpu_named("b300"), context=context, requests=requests, **request)
    (stage,) = plan_capacity(plan, asked).stages
    assert stage.speed is not None
    return stage.speed


def test_which_resource_binds(kimi: Plan) -> None:
    assert speed(kimi, 1, 1024).step.binds == "memory bandwidth: weights"
    assert speed(kimi, 64, 65_536).step.binds == "memory bandwidth: KV cache"
    assert speed(kimi, 20_000, 64).step.binds == "compute"
    assert speed(kimi, 1, 65_536, stage="prefill", prefill_recipe="dequantize").step.binds == "compute"
    assert speed(kimi, 1, 64, stage="prefill", prefill_recipe="dequantize").step.binds == "memory bandwidth: weights"


def test_where_an_fp8_cache_starts_to_pay(kimi: Plan) -> None:
    found = speed(kimi, 64, 8192, share=0.1, overhead_seconds=1e-3)
    crossover = found.crossover
    assert crossover is not None
    for length, holds in ((crossover.saves_length, 0.1), (crossover.breaks_even_length, 1e-3)):
        assert length is not None
        for at, expected in ((length, True), (length - 64, False)):
            fp8, bf16 = (
                speed(kimi, 64, at, kv_format=form).step.seconds or 0.0
                for form in (CacheFormat.FP8_E4M3, CacheFormat.BF16)
            )
            saved = bf16 - fp8
            assert (saved >= holds * bf16 if holds == 0.1 else saved >= holds) is expected
    assert crossover.kv_over_weights_length is not None
    assert crossover.kv_over_weights_length > crossover.saves_length
    assert crossover.longest is not None
    assert crossover.longest_bf16 is not None
    assert crossover.longest == pytest.approx(2 * crossover.longest_bf16, abs=128)


def test_with_an_indexer_the_saving_is_outgrown() -> None:
    # The top k of 256 keys stops growing; the indexer's own keys do not.
    plan = plan_of(tiny("glm-5.2-fp8", max_position_embeddings=2**20), "glm-5.2-int4", tensor_parallel=2)
    crossover = speed(plan, 64, 1024, share=0.05).crossover
    assert crossover is not None
    assert crossover.saves_length is not None
    assert crossover.saves_until_length is not None
    assert crossover.saves_length <= 256 < crossover.saves_until_length < 2**20


def test_a_bf16_cache_is_not_compared_with_itself(kimi: Plan) -> None:
    assert speed(kimi, 1, 1024, kv_format=CacheFormat.BF16).crossover is None


def test_the_shortest_length_is_in_pages_and_within_the_model() -> None:
    assert shortest_length(lambda length: length >= 100, 1000) == 128
    assert shortest_length(lambda length: length >= 1000, 1000) is None
    assert shortest_length(lambda length: True, 10) is None
    assert last_length(lambda length: length <= 500, 1000) == 448
    assert last_length(lambda length: length > 1000, 1000) is None


def test_a_missing_number_of_experts_a_token_is_named() -> None:
    plan = plan_of(tiny("glm-5.2-fp8", num_experts_per_tok=None), "glm-5.2-int4")
    with pytest.raises(ConfigError, match="num_experts_per_tok is missing"):
        plan_capacity(plan, CapacityRequest(gpu=GPUS["h200"], context=100))
