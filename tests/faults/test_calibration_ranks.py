"""Ranks that share more than experts: dense projections, KV scales, the tokens that sparse attention selects."""

from __future__ import annotations

import time
from pathlib import Path

from calibrated_runs import compress, experts, options, recipe, write_ids
from rank_processes import run_ranks, started_ranks
from tiny_checkpoints import make_checkpoint

from faults.trees import tree
from memopt.compressor.calibration_store import CALIBRATION_FOLDER
from memopt.compressor.output_folder import STATE_FOLDER

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
