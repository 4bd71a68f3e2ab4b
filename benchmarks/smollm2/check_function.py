"""Is the glm4_moe model the same function as the Llama? `python -m benchmarks.smollm2.check_function OUT`

transformers computes both in float32 on held-out English: the Llama with the GGUF file's weights, the glm4_moe before
any rounding, and the checkpoints: in BF16, and in block FP8 expanded by `memopt dequantize`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import memopt
from benchmarks.smollm2.as_glm4_moe import ExpertSplit, glm4_moe_config, glm4_moe_weights
from benchmarks.smollm2.llama_source import LlamaSizes
from benchmarks.smollm2.prepare import fetch_source, write_model

WINDOW_TOKENS = 512
NUM_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Likeness:
    """`perplexity` on the text; KL per token (nats) and largest difference of log probabilities to the Llama."""

    name: str
    perplexity: float
    kl: float
    max_difference: float


def llama_model(sizes: LlamaSizes, weights: Mapping[str, np.ndarray]) -> LlamaForCausalLM:
    """transformers' Llama with these float32 weights; every parameter is given."""
    config = LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        max_position_embeddings=sizes.max_tokens,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = {name: torch.from_numpy(values) for name, values in weights.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    _fill(model, state)
    return model


def glm4_moe_model(config: Mapping[str, Any], weights: Iterable[tuple[str, np.ndarray]]) -> Glm4MoeForCausalLM:
    """transformers' glm4_moe with these float32 weights, experts fused as it keeps them; every parameter is given."""
    with torch.device("meta"):
        model = Glm4MoeForCausalLM(Glm4MoeConfig(**config))
    state = {name: torch.from_numpy(values) for name, values in weights}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = range(config["n_routed_experts"])
        parts = {
            part: torch.stack([state.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in experts])
            for part in ("gate", "up", "down")
        }
        state[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        state[f"{prefix}.down_proj"] = parts["down"]
    _fill(model, state)
    return model


def _fill(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Give a model made on "meta" `state` for all its parameters; its rotary tables are computed anew."""
    model.load_state_dict(state, assign=True, strict=True)
    for module in model.modules():
        if hasattr(module, "compute_default_rope_parameters"):
            module.inv_freq, module.attention_scaling = module.compute_default_rope_parameters(model.config)
    model.eval()


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """float32 [windows, tokens, vocabulary] in float32, window after window."""
    model = model.to(torch.float32)
    return torch.cat([model(window[None], use_cache=False).logits.log_softmax(-1) for window in windows])


def likeness(name: str, found: Tensor, llama: Tensor, windows: Tensor) -> Likeness:
    """How like the Llama a model is, from the log probabilities of both."""
    surprise = -found[:, :-1].gather(-1, windows[:, 1:, None]).double().mean()
    kl = (llama.exp() * (llama - found)).sum(-1).double().mean()
    return Likeness(name, math.exp(surprise), float(kl), float((found - llama).abs().max()))


def english_windows(folder: Path, count: int) -> Tensor:
    """`count` windows int64 [count, WINDOW_TOKENS], evenly spaced over the held-out English text."""
    lines = (folder / "held-out-english.jsonl").read_text("utf-8").splitlines()
    tokenizer = Tokenizer.from_file(str(folder / "checkpoint" / "tokenizer.json"))
    ids = [token for line in lines for token in tokenizer.encode(json.loads(line)["text"]).ids]
    whole = len(ids) // WINDOW_TOKENS
    starts = [index * whole // count * WINDOW_TOKENS for index in range(count)]
    return torch.tensor([ids[start : start + WINDOW_TOKENS] for start in starts])


def main() -> None:
    """Print a line for the Llama and one for each glm4_moe form of it."""
    parser = argparse.ArgumentParser(description="The Llama and its glm4_moe forms on the same text, in float32.")
    parser.add_argument("output", type=Path, help="the folder that benchmarks.smollm2.prepare wrote")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help=f"of {WINDOW_TOKENS} tokens")
    arguments = parser.parse_args()
    source = fetch_source(arguments.output / "downloads")
    windows = english_windows(arguments.output, arguments.windows)
    llama = log_probabilities(llama_model(source.sizes, source.weights), windows)
    rows = [likeness("llama", llama, llama, windows)]
    config = json.loads((arguments.output / "checkpoint" / "config.json").read_text())
    split = ExpertSplit(hidden_multiple=config["hidden_size"])
    float_config = glm4_moe_config(source.sizes, split, config["bos_token_id"], config["eos_token_id"])
    exact = glm4_moe_model(float_config, glm4_moe_weights(source.sizes, source.weights, split))
    rows.append(likeness("glm4_moe, float32", log_probabilities(exact, windows), llama, windows))
    with tempfile.TemporaryDirectory() as scratch:
        write_model(source, Path(scratch, "bf16"), split, use_fp8=False)
        memopt.dequantize(arguments.output / "checkpoint", Path(scratch, "fp8"))
        for name in ("bf16", "fp8"):
            model = Glm4MoeForCausalLM.from_pretrained(Path(scratch, name), dtype=torch.float32)
            rows.append(likeness(f"glm4_moe, {name}", log_probabilities(model, windows), llama, windows))
    print(f"{'model':<20} {'perplexity':>12} {'KL to llama':>14} {'largest log-probability difference':>36}")
    for row in rows:
        print(f"{row.name:<20} {row.perplexity:>12.5f} {row.kl:>14.3e} {row.max_difference:>36.3e}")


if __name__ == "__main__":
    main()
