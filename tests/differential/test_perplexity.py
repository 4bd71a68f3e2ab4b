"""On text that the trained example never saw, a release predicts like its source (benchmarks/perplexity.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tiny_checkpoints import TINY_GLM5

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "perplexity.py"
# Seen over 20 sets of 12 windows: perplexity within 0.6 % of the source, mean KL at most 0.0022 nats a token, and the
# median KL of mse-signed 0.69 to 0.82 of absmax.
MAX_PERPLEXITY_CHANGE = 0.015
MAX_KL = 0.005
MAX_MEDIAN_RATIO = 0.9


def load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("perplexity_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("idlelib") is None, reason="this Python lacks idlelib, the held-out text")
def test_releases_predict_like_their_source() -> None:
    benchmark = load_benchmark()
    windows = benchmark.token_windows(TINY_GLM5, benchmark.NUM_WINDOWS)
    assert windows.shape == (12, 120)
    rows = {row.name: row for row in benchmark.measure(TINY_GLM5, windows)}
    assert list(rows) == ["source", "absmax", "mse", "mse-signed"]
    source = rows.pop("source")
    assert source.kl == 0
    assert 20 < source.perplexity < 80  # a uniform guess over the vocabulary would be 2,048
    for row in rows.values():
        assert abs(row.perplexity / source.perplexity - 1) < MAX_PERPLEXITY_CHANGE, row
        assert 0 < row.kl < MAX_KL, row
    assert rows["mse-signed"].kl_median < MAX_MEDIAN_RATIO * rows["absmax"].kl_median
    assert rows["mse"].kl_median < rows["absmax"].kl_median
