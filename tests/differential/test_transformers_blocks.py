"""Rotary angles, router and MTP layer against transformers' own modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from step_cases import RowsOf, Steps
from tiny_checkpoints import CONFIGS, tiny_config
from torch import Tensor
from transformers import AutoConfig, DeepseekV3Config
from transformers.modeling_layers import MtpModel
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm_dsa

from differential.reference_weights import read_config, reference_weights
from differential.releases import Release, Releases
from differential.transformers_runs import exact_model
from memopt.errors import ConfigError
from memopt.kernels.kv_formats import FP32
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.model_config import MoeConfig
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import RotaryTable, apply_rope
from memopt.runtime.model.router import route
from memopt.runtime.weights.load_model import LoadOptions, load_decoder

ROTARY: dict[str, Any] = {
    "glm-5.2-fp8": glm_dsa.GlmMoeDsaRotaryEmbedding,
    "kimi-k2-instruct-fp8": deepseek.DeepseekV3RotaryEmbedding,
    "kimi-k2.6-int4": deepseek.DeepseekV3RotaryEmbedding,
    "glm-4.7-fp8": glm4.Glm4MoeRotaryEmbedding,
}


@pytest.mark.parametrize("name", sorted(ROTARY))
def test_rotary_angles_of_the_published_configs(name: str) -> None:
    table = parse_json_object((CONFIGS / f"{name}.json").read_bytes(), name, ConfigError)
    ours = RotaryTable(parse_model_config(table).rope)
    text = table.get("text_config", table)
    model_type = "deepseek_v3" if "kimi" in name else table["model_type"]
    theirs = ROTARY[name](AutoConfig.for_model(**(text | {"model_type": model_type})))
    positions = torch.tensor([0, 1, 63, 4095, 4096, 100_000])
    cos, sin = ours.cos_sin(positions)
    expected = theirs(torch.zeros(1), positions[None])
    for found, wanted in zip((cos, sin), expected, strict=True):
        assert torch.equal(found, wanted[0, :, : found.shape[1]])


@pytest.mark.parametrize("changes", [{"mscale": 0.7}, {"mscale": None, "mscale_all_dim": None}, {"beta_fast": 32.0}])
def test_yarn_variants(changes: dict[str, Any]) -> None:
    table = tiny_config("kimi-k2-instruct-fp8", qk_rope_head_dim=64)
    scaling = {key: value for key, value in (table["rope_scaling"] | changes).items() if value is not None}
    table["rope_scaling"] = dict(scaling)
    config = parse_model_config(table)
    theirs = deepseek.DeepseekV3RotaryEmbedding(DeepseekV3Config(**(table | {"rope_scaling": dict(scaling)})))
    positions = torch.arange(0, 9000, 500)
    cos, sin = RotaryTable(config.rope).cos_sin(positions)
    wanted = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, wanted[0][0, :, :32], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sin, wanted[1][0, :, :32], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_turned_pairs(is_interleaved: bool) -> None:
    x = torch.randn(5, 3, 16)
    angles = torch.randn(5, 8)
    both = torch.cat((angles, angles), dim=-1)
    apply = deepseek.apply_rotary_pos_emb_interleave if is_interleaved else deepseek.apply_rotary_pos_emb
    wanted, _ = apply(x.transpose(0, 1)[None], x.transpose(0, 1)[None], both.cos()[None], both.sin()[None])
    found = apply_rope(x, angles.cos(), angles.sin(), is_interleaved)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_groups", "groups_per_token"), [(1, 1), (4, 2), (8, 8), (8, 1)])
@pytest.mark.parametrize("is_renormalized", [True, False])
def test_router(num_groups: int, groups_per_token: int, is_renormalized: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=32, n_routed_experts=32, num_experts_per_tok=4, n_group=num_groups, topk_group=groups_per_token,
        norm_topk_prob=is_renormalized, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = deepseek.DeepseekV3TopkRouter(config)
    generator = torch.Generator().manual_seed(num_groups)
    weight, bias = torch.randn(32, 32, generator=generator), torch.randn(32, generator=generator) * 0.3
    router.weight.data, router.e_score_correction_bias.data = weight, bias
    x = torch.randn(50, 32, generator=generator)
    moe = MoeConfig(32, 4, 8, 1, num_groups, groups_per_token, is_renormalized, 2.5)
    routing = route(x, weight, bias, moe)
    with torch.no_grad():
        _, weights, ids = router(x)
    order = ids.argsort(dim=1)
    assert torch.equal(routing.expert_ids, ids.gather(1, order))
    torch.testing.assert_close(routing.expert_weights, weights.gather(1, order), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["trained", "glm-4.7", "deepseek-v3"])
def test_mtp_layer(name: str, releases: Releases) -> None:
    """The layer over a prompt and ten further tokens, on the hidden rows of the decoder itself."""
    release = releases.release(name)
    config = parse_model_config(read_config(release.export))
    weights = reference_weights(release.export)
    # transformers shares the decoder's embedding and head.
    shared = {key: value for key, value in weights.items() if not key.endswith(("head.weight", "embed_tokens.weight"))}
    top = {key: weights[key] for key in ("lm_head.weight", "model.embed_tokens.weight")}
    decoder = load_decoder(config, (shared | top).items(), LoadOptions("float32", use_mtp=True))
    ids = torch.randint(0, config.vocab_size, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    steps = Steps(decoder, FP32)
    hidden = decoder.normed(steps.hidden(RowsOf(0, ids[:-1], 0)))
    # Row p: the decoder's hidden row of token p, and token p + 1.
    following = ids[1:]
    rows = [steps.rows(RowsOf(0, following[:29], 0))]
    rows += [steps.rows(RowsOf(0, [following[place]], place, is_prompt=False)) for place in range(29, 39)]
    kv = steps.pools.layers[config.num_layers]
    with torch.inference_mode():
        parts = [decoder.mtp_layers[0].forward(row, hidden[row.positions], kv) for row in rows]
        ours = decoder.mtp_layers[0].logits(torch.cat(parts))
    theirs = transformers_mtp(release, config.num_layers, weights, hidden, following)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def transformers_mtp(
    release: Release, layer: int, weights: dict[str, Tensor], hidden: Tensor, following: list[int]
) -> Tensor:
    """Logits of transformers' MtpModel; of its parts for glm_moe_dsa, which has none there."""
    main = exact_model(release.folder, release.export)
    prefix = f"model.layers.{layer}."
    own = {name.removeprefix(prefix): tensor.float() for name, tensor in weights.items() if name.startswith(prefix)}
    positions, token_ids = torch.arange(len(following))[None], torch.tensor([following])
    if main.config.model_type == "glm_moe_dsa":
        config = copy.deepcopy(main.config)
        config.indexer_types, config.mlp_layer_types = ["full"], ["sparse"]
        block = glm_dsa.GlmMoeDsaDecoderLayer(config, 0).eval()
        copy_weights(block.state_dict(), own)
        with torch.inference_mode():
            embedded = rms_norm(main.model.embed_tokens(token_ids), own["enorm.weight"], config.rms_norm_eps)
            x = torch.cat((embedded, rms_norm(hidden, own["hnorm.weight"], config.rms_norm_eps)[None]), dim=-1)
            angles = main.model.rotary_emb(x, positions)
            mask = torch.full((len(following), len(following)), torch.finfo(torch.float32).min).triu(1)[None, None]
            x, _ = block(x @ own["eh_proj.weight"].T, attention_mask=mask, position_embeddings=angles)
            return main.lm_head(rms_norm(x, own["shared_head.norm.weight"], config.rms_norm_eps))[0]
    mtp = MtpModel(main, 1).float().eval()
    mtp.set_attn_implementation("eager")
    copy_weights(mtp.layers[0].state_dict(), own)
    with torch.inference_mode():
        rows = mtp.forward_layer(0, hidden[None], positions, None, input_ids=token_ids)
        return mtp._project_to_logits(rows)[0]


def copy_weights(state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Stored weights `own` of an MTP layer into a module of transformers."""
    renamed = {"post_norm.weight": "shared_head.norm.weight"}
    for name, parameter in state.items():
        stored = renamed.get(name, name.removeprefix("mtp_block."))
        kind = stored.rpartition(".")[2]
        if kind in ("gate_up_proj", "down_proj"):
            halves = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for expert, part in enumerate(parameter):
                part.copy_(torch.cat([own[f"mlp.experts.{expert}.{half}.weight"] for half in halves]))
        else:
            parameter.copy_(own[stored])
