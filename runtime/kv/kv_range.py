"""Observes how large keys and values get while a model runs, and makes scales of it for an fp8_e4m3 cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from memopt.errors import UsageError
from memopt.kernels.layout import E4M3_MAX, MAGNITUDE_BIN_SHIFT, MAGNITUDE_BINS
from memopt.runtime.kv.kv_scales import UNIT_SCALE, KvScales, LayerScales

WHOLE_RANGE = 100.0


@dataclass(slots=True)
class HeadMagnitudes:
    """Magnitudes seen so far, head by head: the largest, and how many fell into each bin.

    A bin is a run of float32 numbers of equal upper bits, so that its edges are less than 1.6 % apart.
    """

    largest: Tensor | None = None  # float32 [heads]
    counts: Tensor | None = None  # int64 [heads, MAGNITUDE_BINS]

    def add(self, values: Tensor) -> None:
        """Counts values [R, heads, size]. Not-finite ones show in `largest` and are in the last bins."""
        magnitudes = values.detach().to(torch.float32).abs()
        num_heads = magnitudes.shape[1]
        if self.largest is None or self.counts is None:
            self.largest = torch.zeros(num_heads, device=values.device)
            self.counts = torch.zeros((num_heads, MAGNITUDE_BINS), dtype=torch.int64, device=values.device)
        if not magnitudes.numel():
            return
        self.largest = torch.maximum(self.largest, magnitudes.amax(dim=(0, 2)))
        bins = (magnitudes.contiguous().view(torch.int32) >> MAGNITUDE_BIN_SHIFT).to(torch.int64)
        first = torch.arange(num_heads, device=values.device)[:, None] * MAGNITUDE_BINS
        flat = (bins.transpose(0, 1).flatten(1) + first).flatten()
        self.counts += torch.bincount(flat, minlength=num_heads * MAGNITUDE_BINS).view(num_heads, -1)

    def bound(self, percentile: float) -> Tensor:
        """float32 [heads]: a magnitude that so many of a hundred values do not exceed; 100: the largest, exactly."""
        if self.largest is None or self.counts is None:
            raise UsageError("no keys or values were observed", remedy="run the model over some text first")
        if percentile >= WHOLE_RANGE:
            return self.largest
        wanted = (self.counts.sum(dim=1) * (percentile / WHOLE_RANGE)).ceil().to(torch.int64).clamp(min=1)
        bins = (self.counts.cumsum(dim=1) < wanted[:, None]).sum(dim=1)
        upper = (((bins + 1) << MAGNITUDE_BIN_SHIFT) - 1).to(torch.int32).view(torch.float32)
        return torch.minimum(upper, self.largest)


@dataclass(slots=True)
class LayerRange:
    """What one layer stores: K and V of heads, or the latent with its rope as one head's K."""

    key: HeadMagnitudes = field(default_factory=HeadMagnitudes)
    value: HeadMagnitudes = field(default_factory=HeadMagnitudes)

    def observe(self, key: Tensor, value: Tensor | None, slots: Tensor) -> None:
        """As `KvObserver.observe`."""
        is_stored = slots >= 0
        self.key.add(key[is_stored])
        if value is not None:
            self.value.add(value[is_stored])


class KvRange:
    """The ranges of all layers. Pools made with it (new_kv_pools) report to it; without one nothing is spent."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerRange] = {}

    def of_layer(self, layer: int) -> LayerRange:
        """The range of that layer, empty at first."""
        return self.layers.setdefault(layer, LayerRange())

    def scales(self, percentile: float = WHOLE_RANGE) -> KvScales:
        """Scales float32, [] (MLA) or [kv_heads] a layer, that bring the bound of what was observed to 448.

        `percentile`: above 0 to 100; below 100 the rarest large values saturate, and all others have finer steps.
        Raises UsageError for another percentile, for a layer that saw nothing, or saw a value that is not finite.
        """
        if not 0 < percentile <= WHOLE_RANGE:
            raise UsageError(f"percentile is {percentile}", remedy="use more than 0 and at most 100")
        found: dict[int, LayerScales] = {}
        for layer, seen in sorted(self.layers.items()):
            k = _scale(seen.key, percentile, layer)
            v = None if seen.value.largest is None else _scale(seen.value, percentile, layer)
            found[layer] = LayerScales(k, v)
        return KvScales(MappingProxyType(found))


def _scale(seen: HeadMagnitudes, percentile: float, layer: int) -> Tensor:
    bound = seen.bound(percentile).cpu()
    if seen.largest is not None and not bool(seen.largest.isfinite().all()):
        raise UsageError(
            f"layer {layer} computed keys or values that are not finite", remedy="calibrate in float32, or look for NaN"
        )
    # Zeros fit any scale.
    scale = torch.where(bound > 0, bound / E4M3_MAX, UNIT_SCALE)
    return scale.reshape(()) if scale.numel() == 1 else scale
