"""A whole model: embedding, layers, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from memopt.errors import ShapeError
from memopt.kernels.kv_cache.kv_slots import check_slots
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.model_config import ModelConfig
from memopt.runtime.model.mtp import MtpLayer
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import StepRows
from memopt.runtime.model.vocabulary import Embedding, Head
from memopt.runtime.parallel.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Decoder:
    """`norm` [H] is the weight of the final RMS norm; `mtp_layers` is empty unless they were asked for."""

    config: ModelConfig
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Head
    rotary: RotaryTable
    communicator: Communicator
    mtp_layers: tuple[MtpLayer, ...] = ()

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        """Hidden rows [R, H] before the final norm; stores every row's keys in `pools`.

        Raises ShapeError for pools of fewer layers than the model has; on the CPU UsageError for slots that are past
        the pools or shared.
        """
        if len(pools.layers) < len(self.layers):
            raise ShapeError(f"the KV cache has {len(pools.layers)} layers, but the model {len(self.layers)}")
        if rows.slots.device.type == "cpu":
            check_slots(rows.slots, pools.num_pages)
            rows = replace(rows, num_checked_pages=pools.num_pages)
        x = self.embedding(rows.token_ids)
        rope = self.rotary.cos_sin(rows.positions)
        selection: Selection | None = None
        # Pools of MTP layers come behind the decoder's.
        for layer, kv in zip(self.layers, pools.layers, strict=False):
            x, selection = layer(x, rows, kv, selection, rope)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head, and the first MTP layer, takes of hidden rows [N, H]."""
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, V] of hidden rows [N, H] from `forward`."""
        return self.head(self.normed(hidden))
