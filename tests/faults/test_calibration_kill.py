"""Kill -9 while a release is calibrated: a rerun goes on with the layer that was not finished, to the same bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from calibrated_runs import compress, experts, options, recipe, write_ids
from rank_processes import Refusal, run_ranks, started_ranks

import memopt
from faults.small_source import OPTIONS, edit_tensor, make_small_source
from faults.trees import tree
from memopt.compressor.calibration_store import CALIBRATION_FOLDER
from memopt.compressor.output_folder import STATE_FOLDER
from memopt.compressor.progress import CALIBRATE_STAGE
from memopt.errors import ContentError, InterruptedRunError, PeerError, SourceChangedError

POLL_SECONDS = 0.001
GPTQ = recipe([experts("gptq")])


def make_release(source: Path, out: Path, data: Path) -> int:
    return compress(source, out, GPTQ, options(data), options=OPTIONS).num_units


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("source") / "checkpoint")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("data") / "ids.safetensors")


@pytest.fixture(scope="module")
def expected(source: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("expected") / "out"
    make_release(source, out, data)
    return out


def store_of(out: Path) -> Path:
    return out / STATE_FOLDER / CALIBRATION_FOLDER


def _kill_when(condition: Callable[[], bool], *arguments: Path) -> bool:
    """Start it in a process, kill that once `condition` holds; whether it was still running then."""
    with started_ranks(1, make_release, *arguments) as ranks:
        (process,) = ranks.processes
        while process.is_alive() and not condition():
            time.sleep(POLL_SECONDS)
        process.kill()
        process.join()
        return bool(process.exitcode == -9)


def test_kills_in_every_phase_leave_the_same_bytes_and_no_finished_layer_is_done_again(
    source: Path, data: Path, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    store = store_of(out)
    moments: dict[str, Callable[[], bool]] = {
        "first rows": lambda: (store / "hidden-00000").exists(),
        "a layer is done": (store / "layer-00000.json").exists,
        "an MTP layer's part": lambda: any(store.glob("layer-00002.*.safetensors")),
        "units": lambda: any((out / STATE_FOLDER / "units").glob("*.json")),
    }
    done: dict[str, int] = {}
    for moment, condition in moments.items():
        assert _kill_when(condition, source, out, data), moment
        now = {path.name: path.stat().st_ino for path in store.glob("layer-*.json")}
        assert done.items() <= now.items(), f"a finished layer was done again before: {moment}"
        done = now
    assert len(done) == 3
    make_release(source, out, data)
    assert tree(out) == tree(expected)


def test_a_part_that_was_changed_meanwhile_is_refused(source: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert _kill_when((store_of(out) / "layer-00001.json").exists, source, out, data)
    (part,) = store_of(out).glob("layer-00001.*.safetensors")
    raw = bytearray(part.read_bytes())
    raw[-1] ^= 1
    part.write_bytes(raw)
    with pytest.raises(ContentError, match="changed after it was written"):
        make_release(source, out, data)


def stop_after_the_first_layer(source: Path, out: Path, data: Path) -> None:
    def stop(progress: memopt.Progress) -> None:
        if progress.stage == CALIBRATE_STAGE:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedRunError):
        compress(source, out, GPTQ, options(data), options=OPTIONS, progress=stop)
    assert sorted(path.name for path in store_of(out).glob("layer-*.json")) == ["layer-00000.json"]


@pytest.mark.parametrize("size", [0, 1000, None])
def test_rows_that_are_not_whole_are_refused(source: Path, data: Path, tmp_path: Path, size: int | None) -> None:
    stop_after_the_first_layer(source, tmp_path / "out", data)
    rows = store_of(tmp_path / "out") / "hidden-00001"
    if size is None:
        rows.unlink()
    else:
        os.truncate(rows, size)
    with pytest.raises(ContentError, match="is not what the finished layers left"):
        make_release(source, tmp_path / "out", data)


def test_a_source_that_was_changed_after_calibration_read_it_is_refused(
    data: Path, expected: Path, tmp_path: Path
) -> None:
    # A weight of a layer that only runs: its bytes decide what the experts behind it are solved for.
    source, out = make_small_source(tmp_path / "source"), tmp_path / "out"
    name = "model.layers.0.self_attn.o_proj.weight"

    def flip(raw: bytearray) -> None:
        raw[0] ^= 1

    stop_after_the_first_layer(source, out, data)
    edit_tensor(source, name, flip)
    with pytest.raises(SourceChangedError, match="differs from what calibration read") as found:
        make_release(source, out, data)
    assert found.value.tensor == name
    edit_tensor(source, name, flip)
    make_release(source, out, data)
    assert tree(out) == tree(expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_do_not_depend_on_the_number_of_ranks(
    source: Path, data: Path, expected: Path, tmp_path: Path, num_ranks: int
) -> None:
    out = tmp_path / "out"
    num_units = run_ranks(num_ranks, make_release, source, out, data)
    assert len(set(num_units)) == 1
    assert tree(out) == tree(expected)
    # A finished release is looked at by rank 0 alone.
    assert run_ranks(2, make_release, source, out, data) == num_units[:2]
    assert tree(out) == tree(expected)


def test_a_rank_that_dies_ends_the_others_and_another_number_of_ranks_goes_on(
    source: Path, data: Path, expected: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with started_ranks(3, make_release, source, out, data) as ranks:
        while not (store_of(out) / "layer-00000.json").exists():
            time.sleep(POLL_SECONDS)
        ranks.processes[1].kill()
        for rank in (0, 2):
            refusal = ranks.result(rank)
            assert isinstance(refusal, Refusal)
            assert refusal.kind is PeerError
            assert "another rank ended" in refusal.text
    run_ranks(2, make_release, source, out, data)
    assert tree(out) == tree(expected)
