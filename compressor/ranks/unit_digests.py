"""The digests of what a unit's files hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class UnitDigests:
    """SHA-256 (hex) of a unit's tensors, by name. `whole`: of the uncut tensor.

    `ranks`: of what the ranks store, one digest a rank, or one for all (see Cut.num_digests); empty without rank files.
    """

    whole: Mapping[str, str]
    ranks: Mapping[str, tuple[str, ...]]
