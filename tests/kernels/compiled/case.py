"""One kernel at one production shape, as the ahead-of-time gate compiles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

WORK_UNITS = ("thread-instructions per weight", "warp-instructions per token")


@dataclass(frozen=True)
class CompileCase:
    """`name`: "int4_gemm/glm-5.2-o_proj-tp8". `kernel`: the @triton.jit function.

    `signature`: argument -> "*bf16", "i32", … `constants`: the constexpr arguments. `aligned`: arguments besides the
    pointers that 16 divides. `targets`: one is left out only with a comment that says why.
    `work_items`: weights or tokens that one turn of the inner loop of one CTA handles (of the whole kernel when it has
    no loop); instructions are counted per item, as `unit` says. `min_load_bits`: the widest global load of the loop.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: frozenset[str]
    num_warps: int
    num_stages: int
    targets: tuple[str, ...] = ("sm_90", "sm_100", "gfx942")
    work_items: float | None = None
    unit: Literal["thread-instructions per weight", "warp-instructions per token", ""] = ""
    min_load_bits: int = 128
    enable_fp_fusion: bool = False
