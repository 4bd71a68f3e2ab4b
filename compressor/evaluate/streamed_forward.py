"""A model's forward pass over many windows with one layer in memory: each layer runs on all windows before the next.

Hidden states of all tokens stay in host memory, or in a file. In float32 a row does not depend on which windows run
together (runtime, "row-invariant"), so the result does not depend on `batch_tokens`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.token_windows import Window
from memopt.compressor.evaluate.window_rows import WindowBatch, batches, step_rows
from memopt.errors import DiskFullError
from memopt.kernels.kv_formats import KvFormatName, kv_format
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.kv_scales import KvScales
from memopt.runtime.model.model_config import GqaConfig
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.vocabulary import Head
from memopt.runtime.weights.layer_builder import build_embedding, build_head, build_norm
from memopt.runtime.weights.linears import DenseLinear
from memopt.runtime.weights.load_options import LoadOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Tokens that run together: an expert of 256 with top-8 then sees 256 tokens on average.
BATCH_TOKENS = 8_192


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`compute`: type of activations. `weights`: "bf16" expands FP8 and INT4 once, "released" multiplies as stored.

    `scratch`: a folder for the hidden states instead of memory, in a file named by `part`. `on_layer`: called with
    (layers done, layers).
    """

    compute: Literal["bfloat16", "float32"] = "bfloat16"
    weights: Literal["released", "bf16"] = "bf16"
    kv_cache: KvFormatName = "bf16"
    device: str = "cpu"
    batch_tokens: int = BATCH_TOKENS
    scratch: Path | None = None
    part: str = "model"
    on_layer: Callable[[int, int], None] = lambda done, total: None

    @property
    def load_options(self) -> LoadOptions:
        """The runtime's words for it."""
        return LoadOptions(compute=self.compute, weights=self.weights, device=self.device)


@dataclass(frozen=True, slots=True)
class FinalStates:
    """`hidden` [tokens of all windows, H] before the final norm, on the CPU; `logits` makes logits of rows of it."""

    hidden: Tensor
    norm: Tensor
    head: Head
    eps: float
    device: str

    def logits(self, first_row: int, num_rows: int) -> Tensor:
        """float32 [num_rows, V] on the device, of rows `first_row` on."""
        rows = self.hidden[first_row : first_row + num_rows].to(self.device)
        return self.head(rms_norm(rows, self.norm, self.eps))


def final_states(model: StoredModel, windows: Sequence[Window], options: StreamOptions) -> FinalStates:
    """Run `model` on every window, layer by layer; raises what reading and building layers raise, DiskFullError for the
    scratch folder.

    Memory: one layer and its KV pools for one batch, the hidden states [tokens, H], embedding and head.
    """
    import torch

    config, load = model.config, options.load_options
    parts = batches(windows, options.batch_tokens)
    num_rows = sum(part.num_rows for part in parts)
    hidden = _storage(num_rows, config.hidden_size, load.dtype, options.scratch, options.part)
    top = model.top_level()
    embedding = build_embedding(config, top, "model.embed_tokens.weight", load)
    norm = build_norm(config, top, "model.norm.weight", load)
    if config.is_embedding_tied:
        head = Head(DenseLinear(embedding.weight), load.communicator)
    else:
        head = build_head(config, top, "lm_head", load)
    top.finish()
    rotary = RotaryTable(config.rope, options.device)
    scales = model.kv_scales()
    selections: dict[int, Selection | None] = {part.first: None for part in parts}
    with torch.no_grad():
        for part in parts:
            rows = step_rows(part, options.device)
            hidden[part.first_row : part.first_row + part.num_rows] = embedding(rows.token_ids).to("cpu")
        for number in range(config.num_layers):
            _run_layer(model, number, parts, options, hidden, selections, rotary, scales)
            options.on_layer(number + 1, config.num_layers)
    return FinalStates(hidden, norm, head, config.rms_norm_eps, options.device)


def _run_layer(
    model: StoredModel,
    number: int,
    parts: Sequence[WindowBatch],
    options: StreamOptions,
    hidden: Tensor,
    selections: dict[int, Selection | None],
    rotary: RotaryTable,
    scales: KvScales,
) -> None:
    """Take `hidden` and `selections` of all batches through one layer; it and its pages are gone when this returns."""
    config = model.config
    layer = model.layer(number, options.load_options)
    pools = new_kv_pools(
        config,
        kv_format(options.kv_cache),
        # One more for the dummy page.
        max(part.num_pages for part in parts) + 1,
        first_layer=number,
        num_layers=number + 1,
        num_kv_heads_here=config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1,
        scales=scales,
        device=options.device,
    )
    for part in parts:
        rows = step_rows(part, options.device)
        place = slice(part.first_row, part.first_row + part.num_rows)
        rope = rotary.cos_sin(rows.positions)
        x, selection = layer(hidden[place].to(options.device), rows, pools.layers[0], selections[part.first], rope)
        hidden[place] = x.to("cpu")
        selections[part.first] = selection


def _storage(num_rows: int, size: int, dtype: torch.dtype, scratch: Path | None, name: str) -> Tensor:
    """A CPU tensor [num_rows, size], in memory or mapped to a file of `scratch`, which the caller removes."""
    import torch

    if scratch is None:
        return torch.empty(num_rows, size, dtype=dtype)
    count, path = num_rows * size, scratch / f"{name}.hidden"
    num_bytes = count * dtype.itemsize
    # A file with holes would kill the process (SIGBUS) where the disk is full.
    try:
        with open(path, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, num_bytes)
    except OSError as problem:
        raise DiskFullError(
            f"no room for {num_bytes:,} bytes of hidden states: {problem.strerror}",
            file=str(path),
            remedy="name another scratch folder, or use fewer windows",
        ) from None
    return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(num_rows, size)
