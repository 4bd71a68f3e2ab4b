"""Scales of an fp8_e4m3 cache: stored = value / scale, a scale a layer (MLA) or a KV head (GQA), for K and for V."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from memopt.errors import ShapeError, UnknownTensorError
from memopt.runtime.model.model_config import GqaConfig, MlaConfig, ModelConfig

# The names that vLLM reads (model_executor/layers/quantization/kv_cache.py).
_NAME = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.([kv])_scale")
UNIT_SCALE = 1.0


@dataclass(frozen=True, slots=True)
class LayerScales:
    """float32, [] for one scale of the layer or [kv_heads] of all ranks. MLA caches have `k` alone."""

    k: Tensor
    v: Tensor | None


@dataclass(frozen=True, slots=True)
class KvScales:
    """By number of layer; a layer that is not there has UNIT_SCALE. Scales are finite and above 0."""

    layers: Mapping[int, LayerScales]

    def of_layer(self, layer: int) -> LayerScales:
        """The scales of a layer; unit ones when the release has none."""
        return self.layers.get(layer, LayerScales(torch.tensor(UNIT_SCALE), torch.tensor(UNIT_SCALE)))

    def tensors(self, name_prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Names and values as a release stores them: float32 [1] or [kv_heads], layer after layer."""
        for layer, scales in sorted(self.layers.items()):
            yield kv_scale_name(layer, "k", name_prefix), scales.k.reshape(-1)
            yield kv_scale_name(layer, "v", name_prefix), (scales.k if scales.v is None else scales.v).reshape(-1)


UNIT_KV_SCALES = KvScales(MappingProxyType({}))


def kv_scale_name(layer: int, part: Literal["k", "v"], name_prefix: str = "") -> str:
    """The tensor that holds a layer's scale of K or V. MLA's is under "k"; "v" repeats it: vLLM asks for both."""
    return f"{name_prefix}model.layers.{layer}.self_attn.{part}_scale"


class KvScaleFilter:
    """Takes the KV scales out of a release's stream of tensors, which are no weights."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._found: dict[tuple[int, str], Tensor] = {}

    def rest(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All other tensors, in order. Raises ShapeError for a scale that does not fit or is not above 0,
        UnknownTensorError for one of a layer that the model does not have.
        """
        num_layers = self._config.num_layers + self._config.num_mtp_layers
        for name, tensor in tensors:
            match = _NAME.fullmatch(name.removeprefix(self._config.name_prefix))
            if match is None:
                yield name, tensor
            elif int(match[1]) >= num_layers:
                raise UnknownTensorError(
                    f"the model has {num_layers} layers",
                    tensor=name,
                    remedy="check that config.json belongs to these weights",
                )
            else:
                self._found[int(match[1]), match[2]] = _checked(name, tensor, self._config)

    def scales(self) -> KvScales:
        """What was found so far. A layer with one of the two has it for both."""
        layers: dict[int, LayerScales] = {}
        for layer in sorted({layer for layer, _ in self._found}):
            k, v = (self._found.get((layer, part)) for part in "kv")
            either = k if k is not None else v
            if either is not None:
                is_mla = isinstance(self._config.attention, MlaConfig)
                layers[layer] = LayerScales(either, None if is_mla else (either if v is None else v))
        return KvScales(MappingProxyType(layers))


def kv_scales_of(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]) -> KvScales:
    """The scales among named tensors, which are all read; unit ones where there are none. Errors: KvScaleFilter."""
    found = KvScaleFilter(config)
    for _ in found.rest(tensors):
        pass
    return found.scales()


def _checked(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """float32 [] or [kv_heads], on the CPU."""
    num_heads = config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1
    if tensor.numel() not in (1, num_heads) or tensor.ndim > 1:
        raise ShapeError(
            f"{name} is {list(tensor.shape)}, but [] or [1]{f' or [{num_heads}]' if num_heads > 1 else ''} is needed",
            remedy="calibrate the release again",
            tensor=name,
        )
    scale = tensor.detach().to("cpu", torch.float32)
    if not bool(((scale > 0) & scale.isfinite()).all()):
        raise ShapeError(
            f"{name} holds {float(scale.min())}, but a scale is finite and above 0",
            remedy="calibrate the release again",
            tensor=name,
        )
    return scale.reshape(()) if scale.numel() == 1 else scale.clone()
