"""MLA decode, dense and over selected tokens, at the shapes of GLM-5.2 and Kimi K2.6: 64 heads, 8 a rank at TP8.

A rank with all 64 heads (data-parallel attention) takes them in tiles of 16. The configurations are the launcher's own,
and these are all of them for NVIDIA; AMD's is the same for any number of heads.
Issue budget: <= 150 warp-instructions a token at 8 heads. `work_items` is the tokens of one turn of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from compiled.case import CompileCase
from memopt.kernels.attention import mla_decode_triton
from memopt.kernels.attention.decode_config import GpuFamily
from memopt.kernels.attention.mla_decode_kernel_triton import mla_decode_kernel
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import (
    DS_MLA_SCALE_GROUP,
    DS_MLA_TOKEN_BYTES,
    MLA_KEY_SIZE,
    MLA_ROPE_SIZE,
    PAGE_TOKENS,
)

TARGETS: dict[GpuFamily, str] = {"hopper": "sm_90", "blackwell": "sm_100", "amd": "gfx942"}
HEADS_TP8, HEADS_TP1 = 8, 64
PER_TOKEN = "warp-instructions per token"

# Elements from token to token in the views of latents, ropes and scales.
TOKEN_STRIDES = {
    BF16.name: (MLA_KEY_SIZE, MLA_KEY_SIZE, MLA_KEY_SIZE),
    FP8_E4M3.name: (MLA_KEY_SIZE, MLA_KEY_SIZE, MLA_KEY_SIZE),
    FP8_DS_MLA.name: (DS_MLA_TOKEN_BYTES, DS_MLA_TOKEN_BYTES // 2, DS_MLA_TOKEN_BYTES // 4),
}
POINTERS = {
    BF16.name: ("*bf16", "*bf16", "*bf16"), FP8_E4M3.name: ("*u8", "*u8", "*u8"),
    FP8_DS_MLA.name: ("*u8", "*bf16", "*fp32"),
}  # fmt: skip
MLA_SIGNATURE = {
    "query_latent": "*bf16", "query_rope": "*bf16", "latents_stride": "i32", "ropes_stride": "i32",
    "scales_stride": "i32", "num_pages": "i32", "block_table": "*i32", "positions": "*i32", "layer_scale": "*fp32",
    "softmax_scale": "fp32", "lse": "*fp32", "num_heads": "i32", "max_pages": "i32", "num_splits": "i32",
}  # fmt: skip


def _mla(model: str, kv_format: KvFormat, heads: int, *, selected: bool) -> Iterator[CompileCase]:
    for family, target in TARGETS.items():
        if family == "amd" and heads != HEADS_TP8:
            continue  # the same kernel as for 8 heads: its tiles are 16 heads in any case
        config = mla_decode_triton.choose_config(kv_format, heads, family, is_selected=selected)
        latents, ropes, scales = POINTERS[kv_format.name]
        latents_token, ropes_token, scales_token = TOKEN_STRIDES[kv_format.name]
        name = f"{'sparse_' if selected else ''}mla_decode/{model}-{kv_format.name}"
        yield CompileCase(
            name=f"{name}-{family}",
            kernel=mla_decode_kernel,
            signature={
                **MLA_SIGNATURE, "latents": latents, "ropes": ropes, "scales": scales,
                # Splits write float32; one split, of many requests, writes the result itself.
                "out": "*fp32" if heads == HEADS_TP8 else "*bf16",
                "num_tokens": "i32" if selected else "*i32",
            },
            constants={
                "FORMAT": mla_decode_triton.FORMATS[kv_format.name], "SELECTED": selected, "HEADS": config.heads,
                "TILE": config.tile, "PAGE": PAGE_TOKENS, "GROUP": DS_MLA_SCALE_GROUP, "ROPE": MLA_ROPE_SIZE,
                "LATENTS_TOKEN": latents_token, "ROPES_TOKEN": ropes_token, "SCALES_TOKEN": scales_token,
            },
            aligned=frozenset({"latents_stride", "ropes_stride", "scales_stride"}),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            targets=(target,),
            work_items=config.tile,
            unit=PER_TOKEN,
        )  # fmt: skip


CASES: tuple[CompileCase, ...] = (
    *_mla("kimi-k2.6-tp8", FP8_E4M3, HEADS_TP8, selected=False),
    *_mla("kimi-k2.6-tp8", BF16, HEADS_TP8, selected=False),
    *_mla("glm-5.2-tp8", FP8_DS_MLA, HEADS_TP8, selected=False),
    *_mla("64-heads", FP8_E4M3, HEADS_TP1, selected=False),
    *_mla("64-heads", BF16, HEADS_TP1, selected=False),
    *_mla("64-heads", FP8_DS_MLA, HEADS_TP1, selected=False),
    *_mla("glm-5.2-tp8", FP8_DS_MLA, HEADS_TP8, selected=True),
    *_mla("glm-5.2-tp8", FP8_E4M3, HEADS_TP8, selected=True),
    *_mla("glm-5.2-tp8", BF16, HEADS_TP8, selected=True),
    *_mla("64-heads", FP8_DS_MLA, HEADS_TP1, selected=True),
    *_mla("64-heads", FP8_E4M3, HEADS_TP1, selected=True),
    *_mla("64-heads", BF16, HEADS_TP1, selected=True),
)
