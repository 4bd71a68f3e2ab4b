"""Routed experts one after the other, and an INT4 stack, against float64; a block's parts together."""

from __future__ import annotations

import pytest
import torch
from stored_linears import float8_weight, int4_tensors
from tiny_checkpoints import tiny_config
from torch import Tensor

from memopt.kernels.gemm.int4_gemm_reference import weight_values
from memopt.kernels.gemm.int4_weight import Int4Weight
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.experts import Experts, Int4Experts, MlpExperts
from memopt.runtime.model.mlp import GatedMlp
from memopt.runtime.model.model_config import MoeConfig
from memopt.runtime.model.moe import MoeBlock
from memopt.runtime.model.router import Routing
from memopt.runtime.parallel.communicator import SingleRank
from memopt.runtime.weights.expert_builder import build_experts
from memopt.runtime.weights.expert_tensors import ExpertTensors
from memopt.runtime.weights.layer_names import ExpertNames
from memopt.runtime.weights.linears import DenseLinear
from memopt.runtime.weights.load_options import LoadOptions

NUM_EXPERTS, HIDDEN, SIZE = 4, 64, 160  # 160 rows end within an FP8 block
CONFIG = parse_model_config(
    tiny_config("glm-5.2-fp8", hidden_size=HIDDEN, moe_intermediate_size=SIZE, n_routed_experts=NUM_EXPERTS)
)
SHAPES = {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}


def stored_experts(form: str, first: int = 0, count: int = NUM_EXPERTS) -> tuple[ExpertTensors, dict[str, Tensor]]:
    """This rank's tensors, and the value of every expert's weights."""
    tensors, values = ExpertTensors("layer.", ExpertNames(first, count)), {}
    for expert in range(NUM_EXPERTS):
        for place, (projection, (rows, columns)) in enumerate(SHAPES.items()):
            seed = expert * 3 + place
            if form == "int4":
                parts = int4_tensors(rows, columns, 32)
                parts["weight_packed"] = parts["weight_packed"] ^ (seed * 0x01234567)
                value = weight_values(Int4Weight(parts["weight_packed"], parts["weight_scale"], 32))
            elif form == "fp8":
                codes, scale = float8_weight(rows, columns, (128, 128), seed)
                parts = {"weight": codes, "weight_scale_inv": scale}
                spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
                value = (codes.float() * spread).to(torch.bfloat16)
            else:
                value = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
                parts = {"weight": value}
            values[f"{expert}.{projection}"] = value.double()
            if first <= expert < first + count:
                for part, tensor in parts.items():
                    tensors.add(expert, projection, part, tensor)
    assert tensors.is_complete
    return tensors, values


def exact(x: Tensor, routing: Routing, values: dict[str, Tensor], experts: range) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(routing.expert_ids.tolist(), routing.expert_weights, strict=True)):
        for expert, weight in zip(ids, weights.double(), strict=True):
            if expert in experts:
                gate, up = (values[f"{expert}.{name}"] @ x[token].double() for name in ("gate_proj", "up_proj"))
                total[token] += weight * (values[f"{expert}.down_proj"] @ (torch.nn.functional.silu(gate) * up))
    return total


def some_routing(num_tokens: int) -> Routing:
    generator = torch.Generator().manual_seed(9)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :2].sort(dim=1).values
    return Routing(ids, torch.rand(num_tokens, 2, generator=generator))


def check(experts: Experts, values: dict[str, Tensor], here: range) -> None:
    x, routing = torch.randn(21, HIDDEN), some_routing(21)
    found, expected = experts(x, routing), exact(x, routing, values, here)
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-5
    one = Routing(routing.expert_ids[5:6], routing.expert_weights[5:6])
    assert torch.equal(experts(x[5:6], one)[0], found[5])


@pytest.mark.parametrize("form", ["int4", "fp8", "plain"])
def test_every_form_against_float64(form: str) -> None:
    tensors, values = stored_experts(form)
    experts = build_experts(CONFIG, tensors, LoadOptions("float32"))
    assert isinstance(experts, Int4Experts if form == "int4" else MlpExperts)
    check(experts, values, range(NUM_EXPERTS))


@pytest.mark.parametrize("form", ["int4", "fp8", "plain"])
def test_a_rank_adds_its_own_experts_alone(form: str) -> None:
    tensors, values = stored_experts(form, first=2, count=2)
    check(build_experts(CONFIG, tensors, LoadOptions("float32")), values, range(2, 4))


def test_expanded_experts_are_rounded_to_bf16() -> None:
    tensors, values = stored_experts("int4")
    experts = build_experts(CONFIG, tensors, LoadOptions("float32", "bf16"))
    assert isinstance(experts, MlpExperts)
    check(experts, {name: value.to(torch.bfloat16).double() for name, value in values.items()}, range(NUM_EXPERTS))


def test_a_block_adds_its_shared_expert() -> None:
    tensors, values = stored_experts("plain")
    experts = build_experts(CONFIG, tensors, LoadOptions("float32"))
    shared = GatedMlp(DenseLinear(torch.randn(2 * 48, HIDDEN)), DenseLinear(torch.randn(HIDDEN, 48)))
    config = MoeConfig(NUM_EXPERTS, 2, SIZE, 1, 1, 1, True, 2.0)
    weight, bias = torch.randn(NUM_EXPERTS, HIDDEN), torch.randn(NUM_EXPERTS)
    block = MoeBlock(weight, bias, config, experts, shared, SingleRank())
    x = torch.randn(6, HIDDEN)
    routing = block.routing(x)
    torch.testing.assert_close(routing.expert_weights.sum(dim=1), torch.full((6,), 2.0))
    expected = exact(x, routing, values, range(NUM_EXPERTS)) + shared(x).double()
    torch.testing.assert_close(block(x).double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(MoeBlock(weight, bias, config, experts, None, SingleRank())(x), experts(x, routing))
