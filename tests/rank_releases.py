"""Releases of tiny checkpoints in several layouts, and what their files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memopt
from memopt.compressor.pipeline import RunResult

# Several units, some within a layer.
MAX_FILE_BYTES = 300_000


def compress_in(source: Path, out: Path, *, recipe: str | None = None, workers: int = 2, **options: Any) -> RunResult:
    """memopt.compress on the CPU with PlanOptions of `options`."""
    chosen = memopt.PlanOptions(**{"max_file_bytes": MAX_FILE_BYTES, **options})
    return memopt.compress(source, out, recipe=recipe, options=chosen, workers=workers, device="cpu")
