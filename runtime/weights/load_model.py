"""A whole model from a stream of verified tensors, layer by layer: the release is never in memory twice."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor

from memopt.errors import MissingTensorError, UnknownTensorError
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.vocabulary import Head
from memopt.runtime.weights.layer_builder import build_embedding, build_head, build_mtp_layer, build_norm
from memopt.runtime.weights.layer_builder import build_layer as build_layer
from memopt.runtime.weights.layer_names import layer_names, top_level_names
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linears import DenseLinear
from memopt.runtime.weights.load_options import LoadOptions as LoadOptions

_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
# Buffers of old checkpoints, and the scales of a quantized KV cache, which kv/kv_scales.py reads.
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq|.*\.self_attn\.(k_scale|v_scale)")
# Kimi K2.5's other tower; the text model runs without it.
_VISION = re.compile(r"(vision_tower|mm_projector)\..+")
# What a tied model may store and does not use: its head is the embedding.
_HEAD = "lm_head."


class ModelLoader:
    """Takes tensors in any order and builds a layer as soon as all of its tensors are there."""

    def __init__(self, config: ModelConfig, options: LoadOptions) -> None:
        self._config = config
        self._options = options
        self._rotary = RotaryTable(config.rope, options.device)
        self._top = LayerTensors(config.name_prefix, top_level_names(config))
        num_layers = config.num_layers + (config.num_mtp_layers if options.use_mtp else 0)
        self._waiting = {layer: self._layer_tensors(layer) for layer in range(num_layers)}
        self._built: dict[int, DecoderLayer] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """One stored tensor. Raises UnknownTensorError for a name that the model does not have."""
        if _NOT_WEIGHTS.fullmatch(name) or (self._config.family == "kimi_k25" and _VISION.fullmatch(name)):
            return
        prefix = self._config.name_prefix
        if not name.startswith(prefix):
            raise UnknownTensorError(f"tensors of this model start with {prefix!r}", tensor=name)
        local = name.removeprefix(prefix)
        match = _LAYER.fullmatch(local)
        if match is None:
            if not (self._config.is_embedding_tied and local.startswith(_HEAD)):
                self._top.add(local, tensor)
            return
        layer = int(match[1])
        if self._config.num_layers <= layer < self._config.num_layers + self._config.num_mtp_layers:
            if self._options.use_mtp:
                self._waiting[layer].add(match[2], tensor)
            return
        if layer not in self._waiting:
            reason = "comes after its layer was complete" if layer in self._built else "belongs to no layer"
            raise UnknownTensorError(
                f"the tensor {reason} of this model of {self._config.num_layers}",
                tensor=name,
                remedy="check that config.json belongs to these weights",
            )
        tensors = self._waiting[layer]
        tensors.add(match[2], tensor)
        if tensors.is_complete:
            self._built[layer] = build_layer(self._config, layer, self._waiting.pop(layer), self._options)
            tensors.finish()

    def finish(self) -> Decoder:
        """The model. Raises MissingTensorError for what never came, UnknownTensorError for what nothing uses."""
        missing = self._top.missing() + [name for tensors in self._waiting.values() for name in tensors.missing()]
        if missing:
            more = f", and {len(missing) - 1:,} more are missing" if len(missing) > 1 else ""
            raise MissingTensorError(
                f"the model needs this tensor, and the weights lack it{more}",
                tensor=missing[0],
                remedy="check that config.json belongs to these weights",
            )
        config, options, communicator = self._config, self._options, self._options.communicator
        embedding = build_embedding(config, self._top, "model.embed_tokens.weight", options)
        if config.is_embedding_tied:
            head = Head(DenseLinear(embedding.weight), communicator)
        else:
            head = build_head(config, self._top, "lm_head", options)
        norm = build_norm(config, self._top, "model.norm.weight", options)
        self._top.finish()
        mtp_layers = []
        for layer in sorted(self._waiting):
            tensors = self._waiting.pop(layer)
            mtp_layers.append(build_mtp_layer(config, layer, tensors, options, embedding, head, self._rotary))
            tensors.finish()
        layers = tuple(self._built[layer] for layer in range(config.num_layers))
        return Decoder(config, embedding, layers, norm, head, self._rotary, communicator, tuple(mtp_layers))

    def _layer_tensors(self, layer: int) -> LayerTensors:
        names = layer_names(self._config, layer, self._options)
        return LayerTensors(f"{self._config.name_prefix}model.layers.{layer}.", names)


def load_decoder(config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], options: LoadOptions) -> Decoder:
    """The model of `config` from (name, tensor) pairs in any order, as `Release.iter_tensors` yields them.

    A layer is built, in its final form, when its last tensor has come: memory holds the finished layers and what has
    come of the others. With `options.communicator` of N ranks the tensors are this rank's cuts (docs/formats.md,
    "Tensor-parallel rules"). Left out: vision towers, `rotary_emb.inv_freq`, KV scales, and MTP layers unless they are
    asked for. Raises MissingTensorError, UnknownTensorError, ShapeError or UnsupportedError naming the tensor.
    """
    loader = ModelLoader(config, options)
    for name, tensor in tensors:
        loader.add(name, tensor)
    return loader.finish()
