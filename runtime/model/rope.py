"""Rotary position embedding, plain or stretched by YaRN, in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from memopt.kernels.rows.layer_rows import has_row_kernels, rotate_on_cpu
from memopt.runtime.model.model_config import RopeConfig, YarnConfig


class RotaryTable:
    """The angles of a model's rotary pairs. One angle a pair: cos and sin are [R, size / 2]."""

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        self._inverse_frequencies = inverse_frequencies(config).to(device)
        self._scale = 1.0 if config.yarn is None else angle_scale(config.yarn)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine float32 [R, size / 2] at `positions` int64 [R], with YaRN's attention factor."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        return angles.cos() * self._scale, angles.sin() * self._scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
    """`x` [R, heads, size] with its pairs turned by the angles of their row; in x's type, float32 inside.

    Interleaved pairs are (0, 1), (2, 3), ...; their results are laid out apart, all first elements and then all
    second ones, as transformers does (apply_rotary_pos_emb_interleave): queries and keys alike, so that products agree.
    """
    if has_row_kernels(x):
        return rotate_on_cpu(x, cos, sin, is_interleaved)
    values = x.to(torch.float32)
    first, second = (values[..., 0::2], values[..., 1::2]) if is_interleaved else values.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def inverse_frequencies(config: RopeConfig) -> Tensor:
    """float32 [size / 2], radians a token. Source: transformers modeling_rope_utils.py, `_compute_yarn_parameters`."""
    steps = torch.arange(0, config.size, 2, dtype=torch.int64).to(torch.float32) / config.size
    wavelengths = config.theta**steps
    yarn = config.yarn
    if yarn is None:
        return 1.0 / wavelengths
    low, high = _correction_range(config, yarn)
    ramp = ((torch.arange(config.size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (yarn.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def angle_scale(yarn: YarnConfig) -> float:
    """What cos and sin are multiplied by: 1 where mscale and mscale_all_dim are equal, as in Kimi K2."""
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)
    return yarn_mscale(yarn.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4); 1 for a factor of at most 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _correction_range(config: RopeConfig, yarn: YarnConfig) -> tuple[float, float]:
    """Pairs between which frequencies go over from kept to stretched."""
    low = math.floor(_pair_of(yarn.beta_fast, config, yarn))
    high = math.ceil(_pair_of(yarn.beta_slow, config, yarn))
    low, high = max(low, 0), min(high, config.size - 1)
    # Equal ends would divide by 0 (transformers adds the same).
    return (low, high + 0.001) if low == high else (low, high)


def _pair_of(num_turns: float, config: RopeConfig, yarn: YarnConfig) -> float:
    """The pair, as a fraction, that turns `num_turns` times over the original context."""
    turns = yarn.original_max_tokens / (num_turns * 2 * math.pi)
    return config.size * math.log(turns) / (2 * math.log(config.theta))
