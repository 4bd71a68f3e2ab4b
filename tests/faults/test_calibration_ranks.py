"""Ranks that share more than experts: dense projections, KV scales, the tokens that sparse attention selects."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from calibrated_runs import compress, experts, options, recipe, write_ids
from rank_processes import Refusal, run_ranks, started_ranks
from tiny_checkpoints import make_checkpoint

from faults.small_source import make_small_source
from faults.trees import tree
from memopt.compressor.calibration_store import CALIBRATION_FOLDER
from memopt.compressor.output_folder import STATE_FOLDER
from memopt.errors import PeerError, UsageError

SMALL = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
# Fewer than a sample has: later rows attend to a choice, which a "shared" layer takes from the one before.
TOP_K = 16
DENSE = {
    "roles": ["attention", "dense_mlp", "shared_expert"],
    "format": {"type": "int4", "method": "gptq", "group_size": 32},
}


def make_release(source: Path, out: Path, data: Path, family: str) -> int:
    form = recipe([experts("gptq"), DENSE], family, kv_cache={"format": "fp8_e4m3", "scales": "calibrated"})
    return compress(source, out, form, options(data)).num_units


def test_dense_projections_and_kv_scales_do_not_depend_on_ranks(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", **SMALL, num_nextn_predict_layers=0)
    data = write_ids(tmp_path / "ids.safetensors")
    make_release(source, tmp_path / "alone", data, "glm4_moe")
    run_ranks(3, make_release, source, tmp_path / "out", data, "glm4_moe")
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


def make_release_on_unlike_machines(source: Path, out: Path, data: Path, little_memory_bytes: int) -> int:
    """Each rank with other threads and other memory; their samples do not divide by either."""
    rank = int(os.environ.get("RANK", "0"))
    asked = options(data, num_samples=5, memory_bytes=(2**30, little_memory_bytes)[rank])
    return compress(source, out, recipe([experts("gptq")]), asked, workers=(4, 1)[rank]).num_units


def test_ranks_may_have_other_numbers_of_threads_and_other_memory(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    data = write_ids(tmp_path / "ids.safetensors")
    make_release_on_unlike_machines(source, tmp_path / "alone", data, 0)
    with started_ranks(2, make_release_on_unlike_machines, source, tmp_path / "refused", data, 1) as ranks:
        refusals = [ranks.result(rank) for rank in range(2)]
    assert all(isinstance(refusal, Refusal) and refusal.kind is UsageError for refusal in refusals)
    needed = re.search(r"one expert needs ([\d,]+) bytes", refusals[0].text)
    assert needed is not None
    # Enough for one expert at a time, where the other rank could have both of its own at once.
    run_ranks(2, make_release_on_unlike_machines, source, tmp_path / "out", data, int(needed[1].replace(",", "")))
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")


def make_release_of_own_data(source: Path, out: Path, folder: Path) -> int:
    """The same command on each rank, but its data file has other contents there."""
    data = folder / f"rank-{os.environ.get('RANK', '0')}" / "ids.safetensors"
    return compress(source, out, recipe([experts("gptq")]), options(data)).num_units


def test_ranks_with_other_data_are_refused(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()
        write_ids(tmp_path / f"rank-{rank}" / "ids.safetensors", seed=rank)
    with started_ranks(2, make_release_of_own_data, source, tmp_path / "out", tmp_path) as ranks:
        first, second = ranks.result(0), ranks.result(1)
    assert isinstance(second, Refusal)
    assert second.kind is UsageError
    assert "rank 1 would make another release than rank 0" in second.text
    assert isinstance(first, Refusal)
    assert first.kind is PeerError
    assert not (tmp_path / "out" / "release.json").exists()


def test_selected_tokens_travel_between_layers_ranks_and_runs(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8", **SMALL, index_topk=TOP_K, num_nextn_predict_layers=0)
    data = write_ids(tmp_path / "ids.safetensors")
    make_release(source, tmp_path / "alone", data, "glm_moe_dsa")
    store = tmp_path / "out" / STATE_FOLDER / CALIBRATION_FOLDER
    with started_ranks(2, make_release, source, tmp_path / "out", data, "glm_moe_dsa") as ranks:
        while not (store / "layer-00001.json").exists():
            time.sleep(0.001)
        for process in ranks.processes:
            process.kill()
    assert (store / "selection-00002").stat().st_size > 0
    make_release(source, tmp_path / "out", data, "glm_moe_dsa")
    assert tree(tmp_path / "out") == tree(tmp_path / "alone")
