"""Which family a config belongs to."""

from __future__ import annotations

from memopt.compressor.checkpoint.model_config import CONFIG_NAME, ModelConfig
from memopt.compressor.families.deepseek_v3 import DeepseekV3, KimiK2
from memopt.compressor.families.family import Family
from memopt.compressor.families.glm4_moe import Glm4Moe
from memopt.compressor.families.glm_moe_dsa import GlmMoeDsa
from memopt.compressor.families.kimi_k25 import KimiK25
from memopt.errors import UnsupportedError

FAMILIES: dict[str, type[Family]] = {
    family.name: family for family in (GlmMoeDsa, Glm4Moe, DeepseekV3, KimiK2, KimiK25)
}


def family_of(config: ModelConfig) -> Family:
    """The family of `config.model_type`; UnsupportedError listing the supported ones."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedError(
            f"model_type {config.model_type!r} is not supported",
            file=CONFIG_NAME,
            remedy=f"supported: {', '.join(sorted(FAMILIES))}",
        )
    return family()
