"""Stage 2 of the KV scales' part of `make test-vllm`: one checkpoint of one model in vLLM, its KV cache left at "auto".

    serve_kv_release.py FOLDER release|wrong|export

GQA (glm4_moe): the release's `kv_cache_scheme` makes the cache FP8, each layer has the release's own two scales, and
the logprobs are near the reference's; with scales too small by WRONG_FACTOR they are not, so the kernels do use them.
How near depends on the kernel (vLLM's on the CPU truncates to FP8, where this project rounds), so less is wanted.

MLA (kimi_k2): vLLM 0.32 gives MLA layers of a compressed-tensors checkpoint no KV method: it drops the scales, takes
1.0, and "auto" stays BF16. That is checked too: when it fails, vLLM has learned it and docs/calibration.md is out of
date. The BF16 export of either has no scales and loads with a BF16 cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from exports import REFERENCE, SCALES_FILE, WRONG_FACTOR, read_case, read_logprobs
from serve_exports import MIN_SHARE, TOLERANCE, compare, open_engine, serve

UNIT = 1.0
MIN_SHARE_WITH_FP8 = 0.85  # of logprobs within TOLERANCE
BF16_CACHES = ("auto", "bfloat16")


def layer_scales(model: torch.nn.Module) -> dict[str, tuple[str, float, float]]:
    """(type of its cache, scale of K, scale of V) of every attention layer, as its kernels are given them."""
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    found: dict[str, tuple[str, float, float]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Attention | MLAAttention):
            tensors = (float(module._k_scale), float(module._v_scale))
            if tensors != (module._k_scale_float, module._v_scale_float):
                raise SystemExit(f"{name}: vLLM holds two values of one scale")
            found[name.split(".self_attn.")[0]] = (module.kv_cache_dtype, *tensors)
    return found


def expected_scales(stored: dict[str, float], layer: str, part: str, *, is_mla: bool) -> tuple[float, float]:
    if is_mla or part == "export":
        return UNIT, UNIT
    factor = WRONG_FACTOR if part == "wrong" else 1.0
    names = (f"{layer}.self_attn.k_scale", f"{layer}.self_attn.v_scale")
    k, v = (float(torch.tensor(stored[name], dtype=torch.float32) / factor) for name in names)
    return k, v


def check(folder: Path, part: str) -> bool:
    """Load and serve one checkpoint; print one line a finding."""
    stored: dict[str, float] = json.loads((folder / SCALES_FILE).read_text())
    case = read_case(folder)
    is_mla = case.name == "kimi_k2"
    is_fp8 = part != "export" and not is_mla
    engine: Any = open_engine(folder / part, case)
    (layers,) = engine.apply_model(layer_scales)
    problems = [] if layers else ["no attention layer was found"]
    for layer, (cache, *scales) in layers.items():
        if (cache == "fp8") != is_fp8 or (not is_fp8 and cache not in BF16_CACHES):
            problems.append(f"{layer} has a KV cache of type {cache}")
        if tuple(scales) != (wanted := expected_scales(stored, layer, part, is_mla=is_mla)):
            problems.append(f"{layer} has scales {scales}, not {wanted}")
    result = compare(case, serve(engine, case), read_logprobs(folder / REFERENCE))
    wanted_share = MIN_SHARE_WITH_FP8 if is_fp8 else MIN_SHARE
    if (result.share >= wanted_share) == (part == "wrong"):
        problems.append("logprobs are " + ("near" if part == "wrong" else "not near") + " the reference's")
    for problem in problems:
        print(f"FAIL {case.name} {part}: {problem}")
    cache, k, v = layers[min(layers)]
    print(
        f"{'FAIL' if problems else 'PASS'} {case.name} {part}: {len(layers)} layers, cache {cache}, the first one's "
        f"scales {k:.6g} and {v:.6g}; {result.share:.1%} of {result.differences.size} logprobs within "
        f"{TOLERANCE} nats, {'less than' if part == 'wrong' else 'at least'} {wanted_share:.0%} wanted"
    )
    return not problems


if __name__ == "__main__":
    sys.exit(0 if check(Path(sys.argv[1]), sys.argv[2]) else 1)
