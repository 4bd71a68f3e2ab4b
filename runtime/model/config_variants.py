"""What config.json may ask for besides sizes, and no block here computes: refused by name, never passed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memopt.errors import UnsupportedError
from memopt.kernels.layout import FP8_BLOCK_COLUMNS, FP8_BLOCK_ROWS
from memopt.runtime.model.model_config import FamilyName

# Fields that change the forward pass, with the values that leave it as it is; null and absent count as such. Names:
# transformers 5.24, vLLM's and SGLang's models of these families and of their relatives.
_PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "sliding_window": (),
    "use_sliding_window": (False,),
    "attention_chunk_size": (),
    "is_causal": (True,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "llama_4_scaling": (),
    "swiglu_limit": (),
    "mla_use_nope": (False,),
    "linear_attn_config": (),
    "index_kpool": (1,),
    "indexer_rope_interleave": (True,),
    "mtp_hidden_states_first": (False,),
}
# GLM-5.x alone: its rotary pairs are interleaved whatever the field says, so it must not say otherwise.
_PLAIN_VALUES_OF_FAMILY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {"glm_moe_dsa": {"rope_interleave": (True,)}}
_FULL_ATTENTION = {"full_attention", "indexed_attention"}
_QUANT_METHODS = ("fp8", "compressed-tensors")
_OTHER_ENGINES = "serve this model with vLLM or SGLang"


def refuse_variants(table: Mapping[str, Any], family: FamilyName, *, file: str) -> None:
    """UnsupportedError for the first field of a text model's table that asks for what is not computed."""
    plain = {**_PLAIN_VALUES, **_PLAIN_VALUES_OF_FAMILY.get(family, {})}
    for field, values in plain.items():
        value = table.get(field)
        if value is not None and value not in values:
            computed = f"{values[0]} is" if values else "none is"
            raise UnsupportedError(f"{field} is {value!r}, but {computed} computed", file=file, remedy=_OTHER_ENGINES)
    kinds = table.get("layer_types")
    for kind in kinds if isinstance(kinds, list) else ():
        if kind not in _FULL_ATTENTION:
            raise UnsupportedError(f"layer_types has {kind!r}", file=file, remedy=_OTHER_ENGINES)


def refuse_quantization(quantization: Any, *, file: str) -> None:
    """UnsupportedError for a `quantization_config` whose weights the loader would not know, or know for others."""
    if not isinstance(quantization, Mapping):
        return
    method = quantization.get("quant_method")
    if method is not None and method not in _QUANT_METHODS:
        raise UnsupportedError(
            f"quant_method is {method!r}, but weights of {' and '.join(_QUANT_METHODS)} are read",
            file=file,
            remedy="use the model's FP8 or BF16 checkpoint, or serve this one with vLLM",
        )
    for name, block in _float8_blocks(quantization):
        if block != [FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS]:
            raise UnsupportedError(
                f"{name} is {block}, but FP8 blocks of {[FP8_BLOCK_ROWS, FP8_BLOCK_COLUMNS]} are multiplied",
                file=file,
                remedy="expand the weights with `memopt dequantize`, or compress them to INT4",
            )


def _float8_blocks(quantization: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Blocks that the table declares, each under the name of its field."""
    if quantization.get("weight_block_size") is not None:
        yield "weight_block_size", quantization["weight_block_size"]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and weights.get("block_structure") is not None:
            block = weights["block_structure"]
            # "128x128" in older compressed-tensors.
            words = block.split("x") if isinstance(block, str) else []
            yield (
                "block_structure",
                [int(word) for word in words] if all(map(str.isdecimal, words)) and words else block,
            )
