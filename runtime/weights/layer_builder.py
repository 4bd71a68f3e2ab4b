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
from memopt.runtime.weights.load_options import LoadOptions
from memopt.runtime.weights.mlp_builder import build_mlp
from memopt.runtime.weights.sized_weights import share_of_rank, sized_linear, sized_tensor


def build_layer(config: ModelConfig, layer: int, tensors: LayerTensors, options: LoadOptions) -> DecoderLayer:
    """Layer number `layer`, whose tensors are taken; the caller calls `tensors.finish()`.

    Raises MissingTensorError, ShapeError or UnsupportedError naming the tensor.
    """
    return DecoderLayer(
        input_norm=build_norm(config, tensors, "input_layernorm.weight", options),
        attention=build_attention(config, layer, tensors, options),
        post_norm=build_norm(config, tensors, "post_attention_layernorm.weight", options),
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
    if tensors.has("embed_tokens.weight"):
        embedding = build_embedding(config, tensors, "embed_tokens.weight", options)
    if tensors.has("shared_head.head.weight"):
        head = build_head(config, tensors, "shared_head.head", options)
    return MtpLayer(
        embedding=embedding,
        embedding_norm=build_norm(config, tensors, "enorm.weight", options),
        hidden_norm=build_norm(config, tensors, "hnorm.weight", options),
        projection=sized_linear(tensors, "eh_proj", config.hidden_size, 2 * config.hidden_size, options),
        layer=build_layer(config, layer, tensors, options),
        norm=build_norm(config, tensors, "shared_head.norm.weight", options),
        head=head,
        rotary=rotary,
    )


def build_embedding(config: ModelConfig, tensors: LayerTensors, name: str, options: LoadOptions) -> Embedding:
    """The embedding `name` ("model.embed_tokens.weight"), this rank's tokens. MissingTensorError, ShapeError."""
    shape = (share_of_rank(config.vocab_size, "tokens", options), config.hidden_size)
    return Embedding(sized_tensor(tensors, name, shape, options), options.communicator)


def build_head(config: ModelConfig, tensors: LayerTensors, module_name: str, options: LoadOptions) -> Head:
    """The output head `module_name` ("lm_head"), this rank's tokens. MissingTensorError, ShapeError."""
    num_rows = share_of_rank(config.vocab_size, "tokens", options)
    return Head(sized_linear(tensors, module_name, num_rows, config.hidden_size, options), options.communicator)


def build_norm(config: ModelConfig, tensors: LayerTensors, name: str, options: LoadOptions) -> Tensor:
    """The weight [H] of a norm over hidden rows. MissingTensorError, ShapeError."""
    return sized_tensor(tensors, name, (config.hidden_size,), options)
