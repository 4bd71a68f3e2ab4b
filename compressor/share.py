"""A share in a recipe: 0.01, or "1%"."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

PERCENT = 100


def _from_percent(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a share is a number or a percentage, not true or false")
    if isinstance(value, str):
        number, sign, rest = value.strip().partition("%")
        if not sign or rest:
            raise ValueError('a share in words is a percentage such as "1%"')
        return float(number) / PERCENT
    return value


Share = Annotated[float, BeforeValidator(_from_percent), Field(ge=0, le=1, allow_inf_nan=False)]
