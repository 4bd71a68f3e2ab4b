"""Projections by form: INT4, FP8 in blocks, rows and whole, plain, stacked and summed over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_linears import float8_weight, int4_tensors, tensors_of
from thread_ranks import run_ranks

from memopt.errors import MissingTensorError, ShapeError, UnknownTensorError, UnsupportedError
from memopt.kernels.float8_reference import dequantize_float8_bf16
from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.kernels.gemm.torch_int4_weight import TorchInt4Weight
from memopt.runtime.weights.linear_builder import build_dense, build_linear
from memopt.runtime.weights.linears import (
    DenseLinear,
    Fp8BlockLinear,
    Int4Linear,
    RowParallelLinear,
    StackedLinear,
)
from memopt.runtime.weights.load_options import LoadOptions
from memopt.runtime.weights.mlp_builder import joined_linear

FLOAT32, BFLOAT16 = LoadOptions("float32"), LoadOptions("bfloat16")


@given(rows=st.integers(1, 300), columns=st.integers(1, 40).map(lambda n: 8 * n), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_fp8_blocks_are_their_bf16_values(rows: int, columns: int, seed: int) -> None:
    codes, scale = float8_weight(rows, columns, (128, 128), seed)
    linear = build_linear(tensors_of(a={"weight": codes, "weight_scale_inv": scale}), "a", FLOAT32)
    assert isinstance(linear, Fp8BlockLinear)
    assert (linear.num_rows, linear.num_columns) == (rows, columns)
    assert linear.size_bytes == rows * columns + linear.scale_inv.nbytes
    x = torch.randn(3, columns)
    dense = DenseLinear(dequantize_float8_bf16(codes, scale, (128, 128)).float())
    assert torch.equal(linear(x), dense(x))
    expanded = build_linear(
        tensors_of(a={"weight": codes, "weight_scale_inv": scale}), "a", LoadOptions("float32", "bf16")
    )
    assert isinstance(expanded, DenseLinear)
    assert torch.equal(expanded.weight, dense.weight)


def test_fp8_is_expanded_in_steps_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = float8_weight(400, 64, (128, 128), 1)
    linear, x = Fp8BlockLinear(codes, scale, (128, 128)), torch.randn(5, 64)
    whole = linear(x)
    monkeypatch.setattr("memopt.runtime.weights.linears.TILE_WEIGHTS", 64 * 128)
    assert torch.equal(linear(x), whole)
    low = linear(x.to(torch.bfloat16))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), whole, rtol=0.05, atol=0.05 * float(whole.abs().max()))


@pytest.mark.parametrize("shape", [(), (1,), (200,), (200, 1)], ids=["scalar", "one", "vector", "column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_of_rows_and_of_the_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes, _ = float8_weight(200, 72, (128, 128), 2)
    scale = (torch.rand(shape) * 1e-3 + 1e-4).to(dtype)
    linear = build_linear(tensors_of(a={"weight": codes, "weight_scale": scale}), "a", FLOAT32)
    x = torch.randn(2, 72)
    values = (codes.float() * scale.float().reshape(-1, 1)).to(torch.bfloat16).float()
    torch.testing.assert_close(linear(x), x @ values.T, rtol=1e-4, atol=1e-5)


def test_fp8_exponent_scales() -> None:
    codes, _ = float8_weight(130, 128, (128, 128), 3)
    exponents = torch.tensor([[118], [121]], dtype=torch.uint8)
    stored = {"weight": codes, "weight_scale_inv": exponents}
    scale = torch.exp2(exponents.float() - 127)
    x = torch.randn(2, 128)
    expected = build_linear(tensors_of(a={"weight": codes, "weight_scale_inv": scale}), "a", FLOAT32)(x)
    assert torch.equal(build_linear(tensors_of(a=stored), "a", FLOAT32)(x), expected)


@pytest.mark.parametrize("group", [32, 64, 96])
def test_int4_in_each_compute_type(group: int) -> None:
    stored = int4_tensors(48, 192 if group != 96 else 96, group)  # 96: one scale a row
    weight = Int4Weight(stored["weight_packed"], stored["weight_scale"], None if group == 96 else group)
    exact = weight_values(weight)
    x = torch.randn(4, exact.shape[1])
    single = build_linear(tensors_of(a=stored), "a", FLOAT32)
    torch.testing.assert_close(single(x), x @ exact.T, rtol=1e-4, atol=1e-4)
    half = build_linear(tensors_of(a=stored), "a", BFLOAT16)
    assert isinstance(half, Int4Linear)
    assert isinstance(half.weight, TorchInt4Weight)
    product = half(x.to(torch.bfloat16))
    assert product.dtype == torch.bfloat16
    assert float((product.float() - x @ exact.T).abs().max() / (x @ exact.T).abs().max()) < 0.02
    dense = build_dense(tensors_of(a=stored), "a", FLOAT32)
    assert torch.equal(dense, exact.to(torch.bfloat16).float())


def test_rows_that_torch_does_not_pack_keep_the_checkpoint_form() -> None:
    linear = build_linear(tensors_of(a=int4_tensors(40, 64, 32)), "a", BFLOAT16)
    assert isinstance(linear, Int4Linear)
    assert isinstance(linear.weight, Int4Weight)
    assert linear.size_bytes == 40 * 32 + 40 * 2 * 2


@pytest.mark.parametrize("make", [lambda: {"weight": torch.randn(6, 32)}, lambda: int4_tensors(6, 32, 32)])
def test_bias(make: object) -> None:
    assert callable(make)
    stored, bias, x = make(), torch.randn(6), torch.randn(3, 32)
    plain = build_linear(tensors_of(a=stored), "a", FLOAT32)(x)
    with_bias = tensors_of(a=stored | {"bias": bias})
    assert torch.equal(build_linear(with_bias, "a", FLOAT32, has_bias=True)(x), plain + bias)
    with pytest.raises(ShapeError, match=r"the bias is \[1\], but the weight has 6 rows"):
        build_linear(tensors_of(a=stored | {"bias": bias[:1]}), "a", FLOAT32, has_bias=True)
    with pytest.raises(MissingTensorError, match="lack it"):
        build_linear(tensors_of(a=stored), "a", FLOAT32, has_bias=True)
    # One that the model does not have is not added, and is left for `finish` to refuse.
    unasked = tensors_of(a=stored | {"bias": bias})
    assert torch.equal(build_linear(unasked, "a", FLOAT32)(x), plain)
    with pytest.raises(UnknownTensorError, match="no block"):
        unasked.finish()


def test_plain_weights_are_widened_or_rounded_once() -> None:
    weight = torch.randn(4, 32)
    rounded = build_linear(tensors_of(a={"weight": weight}), "a", BFLOAT16)
    assert isinstance(rounded, DenseLinear)
    assert torch.equal(rounded.weight, weight.to(torch.bfloat16))
    wide = build_linear(tensors_of(a={"weight": weight.to(torch.bfloat16)}), "a", FLOAT32)
    assert isinstance(wide, DenseLinear)
    assert torch.equal(wide.weight, weight.to(torch.bfloat16).float())


def test_joined_and_stacked_projections_stand_side_by_side() -> None:
    first, second = DenseLinear(torch.randn(5, 32)), DenseLinear(torch.randn(3, 32))
    x = torch.randn(2, 32)
    wanted = torch.cat((first(x), second(x)), dim=1)
    joined, stacked = joined_linear(first, second), StackedLinear((first, second))
    assert isinstance(joined, DenseLinear)
    for linear in (joined, stacked):
        torch.testing.assert_close(linear(x), wanted)
        assert (linear.num_rows, linear.num_columns, linear.size_bytes) == (8, 32, 8 * 32 * 4)
    codes, scale = float8_weight(5, 32, (128, 128), 4)
    assert isinstance(joined_linear(first, Fp8BlockLinear(codes, scale, (128, 128))), StackedLinear)


def test_columns_cut_over_ranks_are_summed() -> None:
    weight, x = torch.randn(6, 64), torch.randn(3, 64)
    halves, parts = weight.chunk(2, dim=1), x.chunk(2, dim=1)
    found = run_ranks(2, lambda rank: RowParallelLinear(DenseLinear(halves[rank.rank]), rank)(parts[rank.rank]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], x @ weight.T, rtol=1e-4, atol=1e-4)


def test_refusals() -> None:
    codes, scale = float8_weight(200, 256, (128, 128), 5)
    with pytest.raises(ShapeError, match="scales"):
        build_linear(tensors_of(a={"weight": codes, "weight_scale_inv": scale[:1]}), "a", FLOAT32)
    with pytest.raises(MissingTensorError, match="weight_scale_inv"):
        build_linear(tensors_of(a={"weight": codes}), "a", FLOAT32)
    with pytest.raises(MissingTensorError, match="lack it"):
        build_linear(tensors_of(a={}), "a", FLOAT32)
    with pytest.raises(UnsupportedError, match="float16"):
        build_linear(tensors_of(a={"weight": torch.zeros(2, 2, dtype=torch.float16)}), "a", FLOAT32)
    stored = int4_tensors(6, 64, 32)
    with pytest.raises(ShapeError, match="weight_shape"):
        build_linear(tensors_of(a=stored | {"weight_shape": torch.tensor([6, 32])}), "a", FLOAT32)
    with pytest.raises(ShapeError, match="bfloat16"):
        build_linear(tensors_of(a=stored | {"weight_scale": stored["weight_scale"].float()}), "a", FLOAT32)
    left_over = tensors_of(a={"weight": codes})
    with pytest.raises(UnknownTensorError, match="no block"):
        left_over.finish()
    with pytest.raises(UnknownTensorError, match="twice"):
        left_over.add("a.weight", codes)
