"""Stage 1 of `make test-vllm`, in memopt's own environment: releases, their BF16 exports, transformers' logprobs.

FP8 checkpoints of random weights are compressed with the shipped recipes and dequantized to plain BF16 again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from exports import DAMAGED, REFERENCE, Case, write_logprobs
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parent.parent))
from tiny_checkpoints import make_checkpoint

import memopt

NUM_NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 7, 33, 70)  # within a KV page, and over its end


@dataclass(frozen=True)
class Model:
    """`block_size`: vLLM's CPU kernels want pages of 16 tokens for MLA, multiples of 32 otherwise."""

    checkpoint: str
    recipe: str
    block_size: int
    changes: dict[str, Any] = field(default_factory=dict)


MODELS = {
    "glm4_moe": Model("glm-4.7-fp8", "glm-4.7-int4", 32),
    # vLLM's CPU MLA kernel is compiled for one size: latent 512 + rope 64.
    "kimi_k2": Model(
        "kimi-k2-instruct-fp8",
        "kimi-k2-int4",
        16,
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    ),
}


def load_reference(export: Path) -> PreTrainedModel:
    """transformers' model of the export, computing in float32. It knows kimi_k2 as deepseek_v3 only."""
    table = json.loads((export / "config.json").read_text())
    if table["model_type"] == "kimi_k2":
        table["model_type"] = "deepseek_v3"
    config = AutoConfig.for_model(**table)
    model, report = AutoModelForCausalLM.from_pretrained(
        export, config=config, dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"]:
        raise SystemExit(f"{export}: transformers misses {sorted(report['missing_keys'])[:3]}")
    return model.eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NUM_NEW_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@torch.no_grad()
def logprobs_after_each(model: PreTrainedModel, sequences: list[list[int]]) -> list[Any]:
    return [model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy() for tokens in sequences]


def damage(model: PreTrainedModel) -> None:
    """Give every routed expert its neighbour's down_proj: right shapes, wrong model."""
    for name, weight in model.named_parameters():
        if name.endswith("experts.down_proj"):
            weight.data = weight.data.roll(1, dims=0)


def make_case(name: str, model: Model, folder: Path) -> None:
    source = make_checkpoint(folder / "source", model.checkpoint, **model.changes)
    memopt.compress(source, folder / "release", recipe=model.recipe)
    memopt.dequantize(folder / "release", folder / "export")
    reference = load_reference(folder / "export")
    generator = torch.Generator().manual_seed(0)
    vocabulary = reference.config.vocab_size
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    sequences = [greedy(reference, prompt) for prompt in prompts]
    write_logprobs(folder / REFERENCE, logprobs_after_each(reference, sequences))
    damage(reference)
    write_logprobs(folder / DAMAGED, logprobs_after_each(reference, sequences))
    versions = {"memopt": memopt.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    Case(name, model.block_size, list(PROMPT_LENGTHS), sequences, versions).write(folder)


def main() -> None:
    root = Path(sys.argv[1])
    for name, model in MODELS.items():
        make_case(name, model, root / name)
        print(f"made {root / name}")


if __name__ == "__main__":
    main()
