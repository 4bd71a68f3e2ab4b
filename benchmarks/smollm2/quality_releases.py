"""The releases that the quality table compares: routed experts in INT4 by every method, in groups of 32 and of 128."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import memopt
from benchmarks.smollm2.quality_models import QualityModel
from memopt.compressor.calibration_options import CalibrationOptions
from memopt.compressor.recipe import GroupSize, Int4Format, QuantizeMethod, Recipe
from memopt.kernels.int4_spec import ScaleSearch

GROUP_SIZES: tuple[GroupSize, ...] = (32, 128)


@dataclass(frozen=True, slots=True)
class QualityCase:
    """`method` under scales by `scale`, in groups of `group_size` weights."""

    method: QuantizeMethod
    scale: ScaleSearch
    group_size: GroupSize

    @property
    def name(self) -> str:
        """Of the release's folder; `rtn` is named by its scale."""
        return f"{self.scale if self.method == 'rtn' else self.method}-g{self.group_size}"

    def recipe(self, family: str) -> Recipe:
        """Routed experts in this format, everything else BF16."""
        form = Int4Format(type="int4", method=self.method, scale=self.scale, group_size=self.group_size)
        table = {
            "name": self.name,
            "description": "A case of the quality table.",
            "families": [family],
            "rules": [{"roles": ["routed_expert"], "format": form.model_dump(exclude_none=True)}],
            "default": "bf16",
        }
        return Recipe.model_validate(table)


CASES = tuple(
    QualityCase(method, scale, group_size)
    for group_size in GROUP_SIZES
    for method, scale in (
        ("rtn", "absmax"),
        ("rtn", "mse"),
        ("rtn", "mse-signed"),
        ("weighted", "mse-signed"),
        ("gptq", "mse-signed"),
    )
)


def make_releases(model: QualityModel, cases: tuple[QualityCase, ...], num_workers: int) -> Iterator[Path]:
    """The release of each case in the model's folder, made unless it is there; an interrupted one is resumed.

    A calibrated one is named by how much it saw.
    """
    for case in cases:
        recipe = case.recipe(model.family)
        name = f"{case.name}-{model.num_samples}x{model.sample_tokens}" if recipe.needs_calibration else case.name
        folder = model.folder / name
        if not (folder / "release.json").exists():
            calibration = None
            if recipe.needs_calibration:
                calibration = CalibrationOptions(
                    model.calibration_ids, model.num_samples, model.sample_tokens, device="cpu"
                )
            memopt.compress(
                model.checkpoint, folder, recipe=recipe, workers=num_workers, device="cpu", calibration=calibration
            )
        yield folder
