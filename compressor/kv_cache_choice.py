"""What a release says about the KV cache: the `kv_cache` of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from memopt.compressor.strict_table import StrictTable


class KvCacheChoice(StrictTable):
    """A KV cache of `format`, with scales that calibration measures, or 1 everywhere ("unit": engines' default).

    `percentile`: the scale covers that many of a hundred magnitudes; None: the largest one. Calibrated scales only.
    """

    format: Literal["fp8_e4m3"]
    scales: Literal["calibrated", "unit"] = "calibrated"
    percentile: Annotated[float, Field(gt=50, lt=100, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _percentile_needs_calibration(self) -> KvCacheChoice:
        if self.percentile is not None and self.scales != "calibrated":
            raise ValueError("percentile goes with scales: calibrated")
        return self
