"""Which experts a token goes to: a sigmoid router whose correction bias chooses and does not weigh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.gemm.moe_rows import choose_on_cpu
from memopt.kernels.gemm.row_tiles import tiled_matmul
from memopt.runtime.model.model_config import MoeConfig

# A group is as good as its two best experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; transformers).
_EXPERTS_OF_GROUP_SCORE = 2
_SMALLEST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class Routing:
    """`expert_ids` int64 [T, k], ascending in a row; `expert_weights` float32 [T, k]."""

    expert_ids: Tensor
    expert_weights: Tensor


def route(x: Tensor, weight: Tensor, bias: Tensor, config: MoeConfig) -> Routing:
    """The experts of `x` float32 [T, H] for a router `weight` float32 [E, H] and correction `bias` float32 [E].

    Source: transformers models/deepseek_v3/modeling_deepseek_v3.py, DeepseekV3TopkRouter. Ids are put in order so that
    the experts' results are summed as transformers does, whatever order top-k finds them in.
    """
    # Not torch.sigmoid: at the end of a tensor it gives other bits than in the middle.
    products = tiled_matmul(x, weight)
    if products.device.type == "cpu":
        return Routing(
            *choose_on_cpu(
                products,
                bias,
                num_choices=config.experts_per_token,
                num_groups=config.num_groups,
                groups_per_token=config.groups_per_token,
                is_renormalized=config.is_renormalized,
                smallest_sum=_SMALLEST_SUM,
                factor=config.routed_scaling_factor,
            )
        )
    scores = 1 / (1 + torch.exp(-products))
    choice = scores + bias
    if config.groups_per_token < config.num_groups:
        choice = choice.masked_fill(~_chosen_groups(choice, config), -torch.inf)
    expert_ids = choice.topk(config.experts_per_token, dim=-1, sorted=False).indices.sort(dim=-1).values
    weights = scores.gather(1, expert_ids)
    if config.is_renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST_SUM)
    return Routing(expert_ids, weights * config.routed_scaling_factor)


def _chosen_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """Bool [T, E]: experts of each token's best groups."""
    groups = choice.view(choice.shape[0], config.num_groups, -1)
    group_scores = groups.topk(_EXPERTS_OF_GROUP_SCORE, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(config.groups_per_token, dim=-1, sorted=False).indices
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, best, True)
    return chosen[..., None].expand_as(groups).reshape(choice.shape)
