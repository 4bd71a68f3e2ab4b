"""The base of everything that is read from a recipe: unknown keys refused, no field changes later."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class StrictTable(BaseModel):
    """A table of a recipe.

    What is None was not asked for, and is left out when the table is written: a recipe that does not use a field has
    the same release.json and fingerprint as before there was that field.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _without_none(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}
