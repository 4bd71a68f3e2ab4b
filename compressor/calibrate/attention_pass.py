"""All samples through one layer's attention, each batch over pages of its own."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.compressor.calibrate.calibration_run import CalibrationRun
from memopt.compressor.calibrate.ordered_map import ordered_map
from memopt.compressor.calibrate.row_file import RowFile
from memopt.compressor.evaluate.window_rows import WindowBatch, step_rows
from memopt.kernels.kv_formats import kv_format
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.kv_range import KvRange
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.model.model_config import GqaConfig
from memopt.runtime.model.norms import rms_norm
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.selection import Selection

# Prepares the layer for one batch: to watch what its projections multiply.
Prepare = Callable[[DecoderLayer, WindowBatch], DecoderLayer]


@dataclass(frozen=True, slots=True)
class Attended:
    """Rows x + attention(norm(x)) of a batch, and the selection that the next layer may share (None: all tokens)."""

    batch: WindowBatch
    rows: Tensor
    selection: Tensor | None


class AttentionPass:
    """Runs layer `number` over this rank's batches, whose rows come from `hidden`.

    `selection`: rows int32 [tokens, top_k] of the layer before, None without one. What the layer stores is not rounded
    further than activations are: fp32 pages for float32, BF16 for bfloat16. `ranges`: what each thread's pages
    were given, for scales.
    """

    def __init__(self, run: CalibrationRun, number: int, hidden: RowFile, selection: RowFile | None) -> None:
        self._run = run
        self._number = number
        self._hidden = hidden
        self._selection = selection
        self._rotary = RotaryTable(run.config.rope, run.load.device)
        self.ranges = [KvRange() for _ in range(run.num_workers)]
        self._pools: queue.SimpleQueue[KvPools] = queue.SimpleQueue()
        for kv_range in self.ranges:
            self._pools.put(self._new_pools(kv_range))

    def outputs(self, layer: DecoderLayer, prepare: Prepare | None = None) -> Iterator[Attended]:
        """Every batch of this rank, in order."""

        def attend(batch: WindowBatch) -> Attended:
            return self._attend(layer if prepare is None else prepare(layer, batch), batch)

        return ordered_map(self._run.pool, attend, self._run.own_batches, self._run.ahead)

    def forget_ranges(self) -> None:
        """Drop what was observed: passes before the last one see other projections."""
        for kv_range in self.ranges:
            for found in kv_range.layers.values():
                found.key.largest = found.key.counts = found.value.largest = found.value.counts = None

    def _attend(self, layer: DecoderLayer, batch: WindowBatch) -> Attended:
        device = self._run.load.device
        rows = step_rows(batch, device)
        x = self._hidden.read(batch.first_row, batch.num_rows).to(device)
        selection = None
        if self._selection is not None:
            selection = Selection(self._selection.read(batch.first_row, batch.num_rows).to(device))
        pools = self._pools.get()
        try:
            attended, selection = layer.attention(
                rms_norm(x, layer.input_norm, layer.eps),
                rows,
                pools.layers[0],
                selection,
                self._rotary.cos_sin(rows.positions),
            )
        finally:
            self._pools.put(pools)
        return Attended(batch, (x + attended).cpu(), None if selection is None else selection.positions.cpu())

    def _new_pools(self, kv_range: KvRange) -> KvPools:
        config = self._run.config
        return new_kv_pools(
            config,
            kv_format("fp32" if self._run.load.dtype == torch.float32 else "bf16"),
            # One more for the dummy page.
            max(batch.num_pages for batch in self._run.batches) + 1,
            first_layer=self._number,
            num_layers=self._number + 1,
            num_kv_heads_here=config.attention.num_kv_heads if isinstance(config.attention, GqaConfig) else 1,
            device=self._run.load.device,
            kv_range=kv_range if self._run.kv_cache is not None else None,
        )
