"""A decoder layer or MTP layer from its stored tensors."""

from __future__ import annotations

from torch import Tensor

from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.model.mtp import MtpLayer
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.vocabulary import Embedding, Head
from memopt.runtime.weights.attention_weights import build_attention
from memopt.runtime.weights.layer_tensors import LayerTensors
from memopt.runtime.weights.linear_builder import build_linear
from memopt.runtime.weights.load_options import LoadOptions
from memopt.runtime.weights.mlp_builder import build_mlp


def build_layer(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> DecoderLayer:
    """Layer number `layer`, whose tensors are taken; the caller calls `tensors.finish()`.

    Raises MissingTensorError, ShapeError or UnsupportedError naming the tensor.
    """
    return DecoderLayer(
        input_norm=norm_weight(tensors, "input_layernorm.weight", options),
        attention=build_attention(config, layer, tensors, options),
        post_norm=norm_weight(tensors, "post_attention_layernorm.weight", options),
        mlp=build_mlp(config, layer, tensors, options),
        eps=config.rms_norm_eps,
    )


def build_mtp_layer(
    config: ModelConfig,
    layer: int,
    tensors: LayerTensors,
    options: LoadOptions,
    embedding: Embedding,
    head: Head,
    rotary: RotaryTable,
) -> MtpLayer:
    """MTP layer number `layer`; `embedding` and `head` of the decoder serve where it has no copies of its own."""
    own_embedding = tensors.take_optional("embed_tokens.weight")
    if own_embedding is not None:
        embedding = Embedding(own_embedding.to(options.device, options.dtype), options.communicator)
    if tensors.has("shared_head.head.weight"):
        head = Head(build_linear(tensors, "shared_head.head", options), options.communicator)
    return MtpLayer(
        embedding=embedding,
        embedding_norm=norm_weight(tensors, "enorm.weight", options),
        hidden_norm=norm_weight(tensors, "hnorm.weight", options),
        projection=build_linear(tensors, "eh_proj", options),
        layer=build_layer(config, layer, tensors, options),
        norm=norm_weight(tensors, "shared_head.norm.weight", options),
        head=head,
        rotary=rotary,
    )


def norm_weight(tensors: LayerTensors, name: str, options: LoadOptions) -> Tensor:
    """A norm's weight or bias in the type of activations."""
    return tensors.take(name).to(options.device, options.dtype)
