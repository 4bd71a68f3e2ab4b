"""Kimi K2.5 and K2.6: the K2 text model below `language_model.`, beside a vision tower."""

from __future__ import annotations

import re

from memopt.compressor.families.deepseek_v3 import KimiK2
from memopt.compressor.families.roles import Role, TensorSpec

# transformers conversion_mapping.py, "kimi_k25". The text config says nothing of the tower: shapes are as found.
_VISION = re.compile(r"(vision_tower|mm_projector)\.[A-Za-z0-9_.]+")


class KimiK25(KimiK2):
    name = "kimi_k25"
    name_prefix = "language_model."

    def extra(self, name: str, shape: tuple[int, ...]) -> TensorSpec | None:
        if _VISION.fullmatch(name):
            is_linear = name.endswith(".weight") and len(shape) == 2
            return TensorSpec(name, shape, Role.VISION, is_linear=is_linear)
        return super().extra(name, shape)
