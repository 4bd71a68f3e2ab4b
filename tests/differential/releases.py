"""Tiny releases of every family, made once a test module."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tiny_checkpoints import TINY_GLM5, make_checkpoint

import memopt
from memopt.compressor.recipe import GroupSize, Int4Format, KeepFormat, Rule
from memopt.kernels.int4_spec import ScaleSearch


def variant(recipe: str, *, group_size: GroupSize = 32, scale: ScaleSearch = "mse-signed") -> memopt.Recipe:
    """A shipped recipe with another INT4 format for the routed experts."""
    shipped = memopt.load_recipe(recipe)
    rule = shipped.rules[0]
    assert isinstance(rule.format, Int4Format)
    changed = Rule(roles=rule.roles, format=Int4Format(type="int4", group_size=group_size, scale=scale))
    return shipped.model_copy(update={"rules": (changed, *shipped.rules[1:])})


def mixed(recipe: str) -> memopt.Recipe:
    """A shipped portable recipe with everything but the experts left as it is stored."""
    changes = {"default": KeepFormat(type="keep"), "engines": ("vllm", "transformers")}
    return memopt.load_recipe(recipe).model_copy(update=changes)


# Release name: checkpoint (TRAINED is the example), recipe.
TRAINED = "tiny-glm5-fp8"
PORTABLE = {
    "glm-5.2": ("glm-5.2-fp8", "glm-5.2-int4"),
    "glm-5.1": ("glm-5.1-fp8", "glm-5.1-int4"),
    "glm-4.7": ("glm-4.7-fp8", "glm-4.7-int4"),
    "deepseek-v3": ("deepseek-v3-fp8", "kimi-k2-int4"),
    "kimi-k2": ("kimi-k2-instruct-fp8", "kimi-k2-int4"),
    "trained": (TRAINED, "glm-5.2-int4"),
}
VARIANTS = {
    "group-64": (TRAINED, variant("glm-5.2-int4", group_size=64)),
    "group-128": ("glm-4.7-fp8", variant("glm-4.7-int4", group_size=128)),
    "channel": ("deepseek-v3-fp8", variant("kimi-k2-int4", group_size="channel")),
    "absmax": (TRAINED, variant("glm-5.2-int4", scale="absmax")),
    "mse": (TRAINED, variant("glm-5.2-int4", scale="mse")),
}
POSITIVE_SCALES = {"absmax", "mse"}
MIXED = {
    "glm-5.2-mixed": ("glm-5.2-fp8", "glm-5.2-int4-fp8"),
    "glm-4.7-mixed": ("glm-4.7-fp8", mixed("glm-4.7-int4")),  # one FP8 scale a row
    "trained-mixed": (TRAINED, "glm-5.2-int4-fp8"),
}
NATIVE = {"kimi-k2.6": ("kimi-k2.6-int4", "kimi-k2.6")}
ALL: dict[str, tuple[str, str | memopt.Recipe]] = PORTABLE | VARIANTS | MIXED | NATIVE
# The real tower's size would be 400 million random numbers.
TINY_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "patch_size": 4,
}


@dataclass(frozen=True)
class Release:
    """A source, its release, and the BF16 export of that release."""

    source: Path
    folder: Path
    export: Path


class Releases:
    """Makes releases on first use, below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, Release] = {}

    def source(self, checkpoint: str) -> Path:
        if checkpoint == TRAINED:
            return TINY_GLM5
        folder = self._root / "sources" / checkpoint
        if not folder.exists():
            make_checkpoint(folder, checkpoint)
            config = json.loads((folder / "config.json").read_text())
            if "text_config" in config:
                config |= {"vision_config": TINY_VISION, "projection_hidden_size": 32}
                (folder / "config.json").write_text(json.dumps(config, indent=1))
        return folder

    def release(self, name: str) -> Release:
        if name not in self._made:
            checkpoint, recipe = ALL[name]
            made = Release(self.source(checkpoint), self._root / name / "release", self._root / name / "export")
            # Kept FP8 blocks of 128 do not divide by the recipe's tensor-parallel 8 at this size.
            options = memopt.PlanOptions(tensor_parallel=1)
            memopt.compress(made.source, made.folder, recipe=recipe, options=options, workers=1, device="cpu")
            memopt.dequantize(made.folder, made.export, options=options, workers=1)
            self._made[name] = made
        return self._made[name]
