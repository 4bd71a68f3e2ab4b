"""The Hessian kernel for the ahead-of-time gate. One source serves every hidden size that 16 divides (all of ours)."""

from __future__ import annotations

from compiled.case import CompileCase
from memopt.kernels.calibration.hessian_triton import CUDA_TILES, HIP_TILES, HessianTiles, hessian_kernel
from memopt.kernels.layout import HESSIAN_CHUNK_TOKENS

SIGNATURE = {
    "hessian": "*fp32",
    "tokens": "*bf16",
    "expert_offsets": "*i64",
    "size": "i32",
    "first_position": "i32",
}


def _case(name: str, tiles: HessianTiles, targets: tuple[str, ...]) -> CompileCase:
    return CompileCase(
        name=name,
        kernel=hessian_kernel,
        signature=SIGNATURE,
        constants={
            "CHUNK_TOKENS": HESSIAN_CHUNK_TOKENS,
            "BLOCK_ROWS": tiles.rows,
            "BLOCK_COLUMNS": tiles.columns,
            "BLOCK_TOKENS": tiles.tokens,
        },
        aligned=frozenset({"size", "first_position"}),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets,
        work_items=tiles.tokens,
        unit="warp-instructions per token",
    )


# Two sets of tiles: AMD has 64 KiB of local memory.
CASES = (
    _case("hessian/glm-5.2-6144-kimi-k2.6-7168", CUDA_TILES, ("sm_90", "sm_100")),
    _case("hessian/glm-5.2-6144-kimi-k2.6-7168-amd", HIP_TILES, ("gfx942",)),
)
