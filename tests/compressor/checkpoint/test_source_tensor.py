"""Storage formats are told by the scale tensor: its name, its type and its shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_refusal
from tiny_checkpoints import tiny_config
from tiny_plans import checkpoint_of, scan, source_of, tiny, with_tensor, without_tensor

from memopt.compressor.checkpoint.checkpoint import Checkpoint
from memopt.compressor.checkpoint.source_tensor import SourceFormat, logical_name
from memopt.errors import MemoptError, MissingTensorError, ShapeError, UnknownTensorError, UnsupportedError

O_PROJ = "model.layers.0.self_attn.o_proj"
GATE = "model.layers.1.mlp.gate.weight"
EXPERT = "language_model.model.layers.1.mlp.experts.0.up_proj"


def only_problem(checkpoint: Checkpoint) -> MemoptError:
    problems = scan(checkpoint).problems
    assert len(problems) == 1, [str(problem) for problem in problems]
    return problems[0]


@pytest.fixture
def block_fp8() -> Checkpoint:
    return tiny("glm-5.2-fp8")


@pytest.fixture
def channel_fp8() -> Checkpoint:
    return tiny("glm-4.7-fp8")


@pytest.fixture
def int4() -> Checkpoint:
    return tiny("kimi-k2.6-int4")


@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8", "F8_E8M0"])
def test_block_scales_of_every_type(block_fp8: Checkpoint, dtype: str) -> None:
    source = source_of(with_tensor(block_fp8, f"{O_PROJ}.weight_scale_inv", dtype, (2, 2)), f"{O_PROJ}.weight")
    assert (source.format, source.block) == (SourceFormat.FP8_BLOCK, (128, 128))
    assert source.description == "fp8-block 128x128"
    assert source.scale is not None
    assert source.scale.dtype == dtype


def test_a_ragged_block_row_counts() -> None:
    checkpoint = tiny("kimi-k2-instruct-fp8", kv_lora_rank=512, qk_rope_head_dim=64)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    source = source_of(checkpoint, name)
    assert source.spec.shape == (576, 256)
    assert source.scale is not None
    assert (source.scale.shape, source.size_bytes) == ((5, 2), 576 * 256 + 5 * 2 * 4)
    problem = only_problem(with_tensor(checkpoint, f"{name}_scale_inv", "F32", (4, 2)))
    assert_refusal(problem, ShapeError, f"{name}_scale_inv", "(4, 2)", "(576, 256)", "(5, 2)")


@pytest.mark.parametrize("shape", [(256, 1), (256,)])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_channel_scales(channel_fp8: Checkpoint, shape: tuple[int, ...], dtype: str) -> None:
    source = source_of(with_tensor(channel_fp8, f"{O_PROJ}.weight_scale", dtype, shape), f"{O_PROJ}.weight")
    assert (source.format, source.block, source.description) == (SourceFormat.FP8_CHANNEL, (1, 256), "fp8-channel")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_for_the_whole_tensor(channel_fp8: Checkpoint, shape: tuple[int, ...]) -> None:
    source = source_of(with_tensor(channel_fp8, f"{O_PROJ}.weight_scale", "F32", shape), f"{O_PROJ}.weight")
    assert (source.format, source.block) == (SourceFormat.FP8_TENSOR, (256, 256))


def test_a_block_grid_under_compressed_tensors_name(channel_fp8: Checkpoint) -> None:
    source = source_of(with_tensor(channel_fp8, f"{O_PROJ}.weight_scale", "F32", (2, 2)), f"{O_PROJ}.weight")
    assert (source.format, source.block) == (SourceFormat.FP8_BLOCK, (128, 128))


def test_the_config_may_declare_another_block() -> None:
    config = tiny_config("glm-5.2-fp8")
    config["quantization_config"]["weight_block_size"] = [64, 32]
    source = source_of(checkpoint_of(config), f"{O_PROJ}.weight")
    assert source.scale is not None
    assert (source.block, source.scale.shape) == ((64, 32), (4, 8))


def test_fp8_is_told_by_the_scale_not_by_a_list(block_fp8: Checkpoint) -> None:
    # modules_to_not_convert names the router; a checkpoint that has it in FP8 with a scale is read all the same.
    checkpoint = with_tensor(block_fp8, GATE, "F8_E4M3", (4, 256))
    checkpoint = with_tensor(checkpoint, f"{GATE}_scale_inv", "F32", (1, 2))
    assert source_of(checkpoint, GATE).format is SourceFormat.FP8_BLOCK
    plain = without_tensor(block_fp8, f"{O_PROJ}.weight_scale_inv")
    plain = with_tensor(plain, f"{O_PROJ}.weight", "BF16", (256, 256))
    assert source_of(plain, f"{O_PROJ}.weight").format is SourceFormat.PLAIN


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_without_its_scale(block_fp8: Checkpoint, dtype: str) -> None:
    checkpoint = without_tensor(block_fp8, f"{O_PROJ}.weight_scale_inv")
    problem = only_problem(with_tensor(checkpoint, f"{O_PROJ}.weight", dtype, (256, 256)))
    assert_refusal(problem, MissingTensorError, f"{O_PROJ}.weight", "model.safetensors", dtype, "without its scale")


def test_a_scale_without_its_weight(block_fp8: Checkpoint) -> None:
    problem = only_problem(without_tensor(block_fp8, f"{O_PROJ}.weight"))
    assert_refusal(problem, MissingTensorError, f"{O_PROJ}.weight_scale_inv", "a scale without its weight")


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E5M2", "I8"])
def test_a_scale_beside_a_weight_that_is_not_e4m3(block_fp8: Checkpoint, dtype: str) -> None:
    problem = only_problem(with_tensor(block_fp8, f"{O_PROJ}.weight", dtype, (256, 256)))
    assert_refusal(problem, ShapeError, f"{O_PROJ}.weight", "has a scale", dtype)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (3, 2), (256, 1), (2, 2, 1), ()])
def test_an_inverse_scale_of_the_wrong_grid(block_fp8: Checkpoint, shape: tuple[int, ...]) -> None:
    problem = only_problem(with_tensor(block_fp8, f"{O_PROJ}.weight_scale_inv", "F32", shape))
    assert_refusal(problem, ShapeError, f"{O_PROJ}.weight_scale_inv", str(shape), "(2, 2)")


@pytest.mark.parametrize("shape", [(255, 1), (1, 256), (2,), (3, 2)])
def test_a_scale_that_is_neither_channel_nor_block(channel_fp8: Checkpoint, shape: tuple[int, ...]) -> None:
    problem = only_problem(with_tensor(channel_fp8, f"{O_PROJ}.weight_scale", "F32", shape))
    assert_refusal(problem, ShapeError, f"{O_PROJ}.weight_scale", str(shape), "(256, 1)", "(2, 2)")


@pytest.mark.parametrize("dtype", ["F16", "F64", "I8", "F8_E4M3"])
def test_a_scale_of_a_type_nobody_writes(block_fp8: Checkpoint, dtype: str) -> None:
    problem = only_problem(with_tensor(block_fp8, f"{O_PROJ}.weight_scale_inv", dtype, (2, 2)))
    assert_refusal(problem, UnsupportedError, f"{O_PROJ}.weight_scale_inv", dtype, "BF16, F32, F8_E8M0, U8")


def test_two_scales_at_once(block_fp8: Checkpoint) -> None:
    problem = only_problem(with_tensor(block_fp8, f"{O_PROJ}.weight_scale", "F32", (256, 1)))
    assert_refusal(problem, ShapeError, f"{O_PROJ}.weight", "two formats at once")


def test_a_shape_that_config_json_does_not_give(block_fp8: Checkpoint) -> None:
    problem = only_problem(with_tensor(block_fp8, GATE, "BF16", (8, 256)))
    assert_refusal(problem, ShapeError, GATE, "(8, 256)", "(4, 256)")


def test_native_int4(int4: Checkpoint) -> None:
    source = source_of(int4, f"{EXPERT}.weight")
    assert (source.format, source.group_size, source.description) == (SourceFormat.INT4_PACKED, 32, "int4 group 32")
    parts = [(part.dtype, part.shape) for part in source.parts]
    assert parts == [("I32", (256, 32)), ("BF16", (256, 8)), ("I64", (2,))]
    as_i32 = with_tensor(int4, f"{EXPERT}.weight_shape", "I32", (2,))
    assert source_of(as_i32, f"{EXPERT}.weight").format is SourceFormat.INT4_PACKED


@pytest.mark.parametrize("part", ["weight_scale", "weight_shape"])
def test_packed_words_without_a_companion(int4: Checkpoint, part: str) -> None:
    problem = only_problem(without_tensor(int4, f"{EXPERT}.{part}"))
    assert_refusal(problem, MissingTensorError, f"{EXPERT}.weight_packed", f"packed words without {part}")


def test_companions_without_packed_words(int4: Checkpoint) -> None:
    problem = only_problem(without_tensor(int4, f"{EXPERT}.weight_packed"))
    assert_refusal(problem, MissingTensorError, EXPERT, "without its weight")


@pytest.mark.parametrize(
    ("part", "dtype", "shape", "error", "words"),
    [
        ("weight_packed", "I32", (256, 31), ShapeError, ("(256, 31)", "(256, 32)")),
        ("weight_packed", "I32", (128, 32), ShapeError, ("(128, 32)", "(256, 32)")),
        ("weight_packed", "U32", (256, 32), ShapeError, ("U32", "I32")),
        ("weight_scale", "F32", (256, 8), UnsupportedError, ("F32", "BF16")),
        ("weight_scale", "BF16", (256, 7), ShapeError, ("(256, 7)", "(256, 256)")),
        ("weight_scale", "BF16", (256, 64), ShapeError, ("(256, 64)", "groups")),
        ("weight_scale", "BF16", (256, 0), ShapeError, ("(256, 0)", "groups")),
        ("weight_scale", "BF16", (255, 8), ShapeError, ("(255, 8)", "groups")),
        ("weight_scale", "BF16", (2048,), ShapeError, ("(2048,)", "groups")),
        ("weight_shape", "F32", (2,), ShapeError, ("F32", "two integers")),
        ("weight_shape", "I64", (3,), ShapeError, ("(3,)", "two integers")),
    ],
)
def test_packed_parts_that_do_not_fit(
    int4: Checkpoint, part: str, dtype: str, shape: tuple[int, ...], error: type[MemoptError], words: tuple[str, ...]
) -> None:
    problem = only_problem(with_tensor(int4, f"{EXPERT}.{part}", dtype, shape))
    assert_refusal(problem, error, f"{EXPERT}.{part}", *words)


def test_packed_and_plain_at_once(int4: Checkpoint) -> None:
    problem = only_problem(with_tensor(int4, f"{EXPERT}.weight", "BF16", (256, 256)))
    assert_refusal(problem, ShapeError, f"{EXPERT}.weight", "both packed and not")


@pytest.mark.parametrize("suffix", ["weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_scale_2"])
def test_asymmetric_act_order_and_fp4_are_refused(int4: Checkpoint, suffix: str) -> None:
    problem = only_problem(with_tensor(int4, f"{EXPERT}.{suffix}", "I32", (32, 8)))
    assert_refusal(problem, UnsupportedError, f"{EXPERT}.{suffix}", "not supported")


@pytest.mark.parametrize("suffix", ["input_scale", "k_scale", "weight_scale_inv_2", "weights"])
def test_an_unknown_companion_is_an_unknown_tensor(block_fp8: Checkpoint, suffix: str) -> None:
    problem = only_problem(with_tensor(block_fp8, f"{O_PROJ}.{suffix}", "F32", (1,)))
    assert_refusal(problem, UnknownTensorError, f"{O_PROJ}.{suffix}", "model.safetensors", "does not know it")


def test_a_vision_weight_is_matched_with_its_scale_whichever_lies_first(int4: Checkpoint) -> None:
    name = "vision_tower.encoder.blocks.0.wo.weight"
    for order in (["weight", "scale"], ["scale", "weight"]):
        checkpoint = int4
        for part in order:
            if part == "weight":
                checkpoint = with_tensor(checkpoint, name, "F8_E4M3", (64, 32))
            else:
                checkpoint = with_tensor(checkpoint, f"{name}_scale", "F32", (64, 1))
        source = source_of(checkpoint, name)
        assert (source.format, source.spec.shape) == (SourceFormat.FP8_CHANNEL, (64, 32))


@pytest.mark.parametrize("suffix", ["weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape"])
def test_parts_share_a_logical_name(suffix: str) -> None:
    assert logical_name(f"{O_PROJ}.{suffix}") == f"{O_PROJ}.weight"
    assert logical_name("model.norm.bias") == "model.norm.bias"


ODD_NAMES = [f"{O_PROJ}.weight_scale_inv", f"{O_PROJ}.weight", f"{O_PROJ}.weight_packed", GATE, "x.weight"]


@given(
    name=st.sampled_from(ODD_NAMES),
    dtype=st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "I32", "I64", "BOOL"]),
    shape=st.lists(st.integers(0, 300), max_size=4).map(tuple),
)
@settings(max_examples=60, deadline=None)
def test_one_odd_tensor_is_a_problem_or_a_source_never_lost(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    checkpoint = with_tensor(tiny("glm-5.2-fp8"), name, dtype, shape)
    found = scan(checkpoint)
    covered = {part.name for source in found.tensors for part in source.parts}
    lost = set(checkpoint.tensors) - covered
    assert all(any(part.rpartition(".")[0] in str(problem) for problem in found.problems) for part in lost)
