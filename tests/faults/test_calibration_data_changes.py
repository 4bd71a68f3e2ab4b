"""Calibration data that changes between its digest and its use: no release names text that it was not made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from calibrated_runs import experts, options, recipe, write_ids

import memopt
from faults.small_source import make_small_source
from memopt.compressor.calibrate.calibrate_model import calibrate_model, require_calibratable
from memopt.compressor.calibration_store import CalibrationStore
from memopt.errors import SourceChangedError


def test_a_file_that_was_swapped_after_it_was_hashed_is_refused(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    asked = options(write_ids(tmp_path / "ids.safetensors"))
    plan = memopt.plan(source, recipe([experts("weighted")]), options=memopt.PlanOptions(calibration=asked.identity()))
    require_calibratable(plan, asked)
    write_ids(asked.data, seed=1)
    with pytest.raises(SourceChangedError, match=r"ids\.safetensors: was changed after its digest was taken"):
        require_calibratable(plan, asked)
    store = CalibrationStore(tmp_path / "store")
    with pytest.raises(SourceChangedError, match="was changed after"):
        calibrate_model(plan, store, asked)
    assert not list(store.folder.iterdir())
    # The same contents in another file are the same data.
    write_ids(asked.data)
    calibrate_model(plan, store, asked)
    assert store.record(1) is not None
