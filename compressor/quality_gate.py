"""What a release must reach to be signed: the `gate` of a recipe. evaluate/gate.py holds quality.json against it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from memopt.compressor.share import Share
from memopt.compressor.strict_table import StrictTable

_Limit = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class QualityGate(StrictTable):
    """Limits on the figures of quality.json; a figure at its limit passes, a figure that was not measured fails.

    `kl_max`: KL divergence to the source, nats a token. `top1_min`: share of tokens whose likeliest next token is the
    source's. `perplexity_ratio_max`: perplexity over the source's. `score_drop_max_points`: what a task may lose, in
    points of 100.
    """

    kl_max: _Limit | None = None
    top1_min: Share | None = None
    perplexity_ratio_max: _Limit | None = None
    score_drop_max_points: _Limit | None = None

    @model_validator(mode="after")
    def _limits_something(self) -> QualityGate:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError(f"a gate needs one of {', '.join(type(self).model_fields)}")
        return self
