"""The row kernels of the CPU against plain torch, with its rounding, and each row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from memopt.kernels.layout import MLA_LATENT_SIZE
from memopt.kernels.rows.layer_rows import mla_keys_on_cpu, rms_norm_on_cpu, rotate_on_cpu, silu_mul_on_cpu
from memopt.kernels.rows.row_values_cpu import exp_float32

TYPES = [torch.bfloat16, torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last place of BF16, where a float32 sum in another order may round the other way."""
    assert found.dtype == expected.dtype
    tolerance = 2**-7 if found.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)
    assert (found == expected).float().mean() > (0.99 if found.dtype == torch.bfloat16 else 0.3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 40, 256])
def test_rms_norm(dtype: torch.dtype, size: int) -> None:
    x, weight = random(5, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    values = x.float()
    quotient = (values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    found = rms_norm_on_cpu(x, weight, 1e-6)
    torch.testing.assert_close(found, weight * quotient, rtol=2**-6 if dtype == torch.bfloat16 else 2e-6, atol=1e-6)
    assert torch.equal(found[3:4], rms_norm_on_cpu(x[3:4], weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotation_pairs_and_padding(dtype: torch.dtype, is_interleaved: bool) -> None:
    x, angles = random(3, 2, 24, dtype=dtype)[..., :20], random(3, 8)
    cos, sin = angles.cos(), angles.sin()
    head = x[..., :16].float()
    first, second = (head[..., 0::2], head[..., 1::2]) if is_interleaved else head.chunk(2, dim=-1)
    turned = (first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None])
    found = rotate_on_cpu(x, cos, sin, is_interleaved, out_size=32)
    assert torch.equal(found[..., :16], torch.cat(turned, dim=-1).to(dtype))
    assert torch.equal(found[..., 16:20], x[..., 16:])
    assert not found[..., 20:].any()


@pytest.mark.parametrize("dtype", TYPES)
def test_silu_mul_and_not_a_number(dtype: torch.dtype) -> None:
    gate_up = random(4, 2 * 37, dtype=dtype) * 8
    gate_up[0, 3] = torch.nan
    gate, up = gate_up.float().chunk(2, dim=-1)
    found = silu_mul_on_cpu(gate_up, dtype)
    assert found[0, 3].isnan()
    assert found.isnan().sum() == 1
    assert_near(found[1:], (gate / (1 + torch.exp(-gate)) * up).to(dtype)[1:])


@pytest.mark.parametrize("dtype", TYPES)
def test_keys_are_normed_turned_and_padded(dtype: torch.dtype) -> None:
    kv, norm, angles = random(3, 32 + 8, dtype=dtype), random(32, dtype=dtype, seed=1), random(3, 4)
    latent, rope = mla_keys_on_cpu(kv, norm, 1e-6, angles.cos(), angles.sin(), True)
    assert latent.shape == (3, MLA_LATENT_SIZE)
    assert not latent[:, 32:].any()
    assert not rope[:, 8:].any()
    assert_near(latent[:, :32].contiguous(), rms_norm_on_cpu(kv[:, :32], norm, 1e-6))
    assert torch.equal(rope[:, None, :8], rotate_on_cpu(kv[:, None, 32:], angles.cos(), angles.sin(), True))


def test_exponential_is_within_two_last_places() -> None:
    @njit
    def fill(values, results):  # type: ignore[no-untyped-def]
        for i in range(values.shape[0]):
            results[i] = exp_float32(values[i])

    values = np.linspace(-87, 88, 100_001, dtype=np.float32)
    results = np.empty_like(values)
    fill(values, results)
    exact = np.exp(values.astype(np.float64))
    assert np.abs(results / exact - 1).max() < 2 * 2**-23
