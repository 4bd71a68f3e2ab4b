"""Stage 1 of the KV scales' part of `make test-vllm`: releases with calibrated scales of an FP8 KV cache.

Dense MLPs and shared experts are INT4, routed experts BF16: vLLM's CPU build has INT4 experts for AMX only. Beside each
release lie its BF16 export, the scales, and the reference's logprobs (transformers, float32); beside that of GQA, whose
cache vLLM makes FP8, also a copy whose scales are too small by WRONG_FACTOR: most keys and values then saturate.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from exports import REFERENCE, SCALES_FILE, WRONG_FACTOR, Case, write_logprobs
from make_exports import MODELS, PROMPT_LENGTHS, greedy, load_reference, logprobs_after_each
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent.parent))
from calibrated_runs import compress, options, recipe, write_ids
from loaded_models import stored_tensors
from tiny_checkpoints import make_checkpoint

import memopt

KV_CACHE = {"format": "fp8_e4m3", "scales": "calibrated"}
INT4 = {"roles": ["dense_mlp", "shared_expert"], "format": {"type": "int4", "group_size": 32}}
# vLLM's CPU kernels want a head size that is a multiple of 32.
HEAD_SIZES = {"glm4_moe": {"head_dim": 64}, "kimi_k2": {}}


def scales_in(folder: Path) -> dict[str, float]:
    """The scales of the KV cache in a checkpoint's files, by name."""
    return {name: float(tensor) for name, tensor in stored_tensors(folder) if name.endswith((".k_scale", ".v_scale"))}


def with_wrong_scales(release: Path, out: Path) -> None:
    shutil.copytree(release, out)
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith((".k_scale", ".v_scale")):
                tensors[name] = tensors[name] / WRONG_FACTOR
        save_file(tensors, file, metadata={"format": "pt"})


def make_case(name: str, folder: Path) -> None:
    model = MODELS[name]
    source = make_checkpoint(folder / "source", model.checkpoint, **model.changes, **HEAD_SIZES[name])
    data = write_ids(folder / "ids.safetensors")
    compress(source, folder / "release", recipe([INT4], name, kv_cache=KV_CACHE), options(data))
    memopt.dequantize(folder / "release", folder / "export")
    (folder / SCALES_FILE).write_text(json.dumps(scales_in(folder / "release")))
    reference = load_reference(folder / "export")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(reference.config.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    versions = {"memopt": memopt.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    sequences = [greedy(reference, prompt) for prompt in prompts]
    write_logprobs(folder / REFERENCE, logprobs_after_each(reference, sequences))
    Case(name, model.block_size, list(PROMPT_LENGTHS), sequences, versions).write(folder)
    if name == "glm4_moe":
        with_wrong_scales(folder / "release", folder / "wrong")


def main() -> None:
    root = Path(sys.argv[1])
    for name in HEAD_SIZES:
        make_case(name, root / name)
        print(f"made {root / name}")


if __name__ == "__main__":
    main()
