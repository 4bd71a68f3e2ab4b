"""Probes of calibrated rounding on a tiny glm4_moe: the forward pass is the product's, a kept result is not redone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from gguf_files import tiny_llama_bytes

from benchmarks.smollm2.as_glm4_moe import ExpertSplit
from benchmarks.smollm2.llama_source import read_llama
from benchmarks.smollm2.prepare import write_model
from benchmarks.smollm2.probes.__main__ import ProbeBench
from benchmarks.smollm2.probes.calibrate_probe import CalibratedExperts, ProbeCalibration
from benchmarks.smollm2.probes.group_sizes import LayerGroups
from benchmarks.smollm2.probes.probe import Feedback, Probe
from benchmarks.smollm2.probes.probe_table import probe_table
from benchmarks.smollm2.probes.probe_texts import ProbeTexts, window_ids
from benchmarks.smollm2.probes.split_forward import SplitForward
from benchmarks.smollm2.probes.split_model import read_split_model
from benchmarks.smollm2.quality_models import QualityModel, write_ids
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.compressor.evaluate.streamed_forward import StreamOptions, final_states
from memopt.compressor.evaluate.token_windows import packed_windows

BASE = Probe("base", num_samples=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> QualityModel:
    folder = tmp_path_factory.mktemp("probes")
    (folder / "tiny.gguf").write_bytes(tiny_llama_bytes())
    write_model(read_llama(folder / "tiny.gguf"), folder / "checkpoint", ExpertSplit(), use_fp8=True)
    for name, first in (("held-out-english", 0), ("held-out-code", 50), ("calibration", 100)):
        lines = [json.dumps({"text": f"the other thing {first + number}, over there"}) for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    texts = ("held-out-english", "held-out-code")
    found = QualityModel("tiny", "glm4_moe", folder / "checkpoint", folder, texts, 16, 16, 64)
    write_ids(found.checkpoint, folder / "calibration.jsonl", found.calibration_ids)
    return found


@pytest.fixture(scope="module")
def forward(model: QualityModel) -> SplitForward:
    return SplitForward(read_split_model(model.checkpoint))


def calibrated(model: QualityModel, forward: SplitForward, probe: Probe) -> CalibratedExperts:
    samples = ProbeTexts(model, 300).samples(probe.text, probe.num_samples)
    return ProbeCalibration(forward, samples, probe).run([LayerGroups(32, 32)] * len(forward.model.layers))


def test_the_wide_mlp_computes_what_the_checkpoint_does(model: QualityModel, forward: SplitForward) -> None:
    windows = ProbeTexts(model, 300).windows("held-out-code", 5)
    found = forward.run(window_ids(windows), [len(window.ids) for window in windows], forward.model.routed)
    with StoredModel(model.checkpoint) as stored:
        states = final_states(stored, windows, StreamOptions(compute="float32", kv_cache="fp32"))
        first = 0
        for window in windows:
            wanted = states.logits(first, window.num_predicted).double()
            given = forward.logits(found[first : first + window.num_predicted]).double()
            first += len(window.ids)
            # BF16 products beside float32.
            assert float((wanted - given).norm() / wanted.norm()) < 0.02


def test_samples_are_those_of_compress(model: QualityModel) -> None:
    data = read_token_data(model.calibration_ids, 300, None)
    wanted = torch.from_numpy(packed_windows(data, 16, model.sample_tokens))
    texts = ProbeTexts(model, 300)
    assert torch.equal(texts.samples("mixed", 16), wanted)
    english, code = texts.samples("english", 8), texts.samples("code", 8)
    assert english.shape == code.shape == (8, 16)
    assert not torch.equal(english, code)


@pytest.mark.parametrize(
    "feedback",
    [Feedback(gate_up=1.0, down=1.0), Feedback(local_down=1.0), Feedback(residual=1.0)],
    ids=["streams", "local", "residual"],
)
def test_feedback_changes_targets_and_without_it_nothing_does(
    model: QualityModel, forward: SplitForward, feedback: Feedback
) -> None:
    base = calibrated(model, forward, BASE)
    again = calibrated(model, forward, replace(BASE, feedback=Feedback(ridge=0.5)))
    moved = calibrated(model, forward, replace(BASE, feedback=feedback))
    for a, b, c in zip(base.routed, again.routed, moved.routed, strict=True):
        assert torch.equal(a.gate, b.gate)
        assert torch.equal(a.down, b.down)
        # Targets stay near the weights: random ones, relative to their size.
        assert float((a.down - c.down).norm() / a.down.norm()) < 0.5
    # The first layer's rows are the same in both streams; of the second, down differs in every case.
    assert torch.equal(base.routed[0].gate, moved.routed[0].gate)
    assert torch.equal(base.routed[0].down, moved.routed[0].down) == (feedback.residual > 0)
    assert not torch.equal(base.routed[1].down, moved.routed[1].down)


def test_results_are_kept_and_compared(model: QualityModel) -> None:
    bench = ProbeBench(model, num_windows=6)
    base = bench.result(BASE)
    weighted = bench.result(replace(BASE, name="weighted", method="weighted"))
    (kept,) = (model.folder / "probes").glob("base-*.json")
    written = kept.stat().st_mtime_ns
    assert ProbeBench(model, num_windows=6).result(BASE) == base
    assert kept.stat().st_mtime_ns == written
    # Another definition under the same name is another result.
    plainer = bench.result(replace(BASE, num_sweeps=0))
    assert plainer.texts != base.texts
    assert kept.stat().st_mtime_ns > written
    assert all(0 < score.kl < 1 for score in base.texts.values())
    assert all(errors.down > 0 and errors.gate_up > 0 for errors in base.errors)
    lines = probe_table([base, weighted], base).splitlines()
    assert lines[2].startswith("| base | 4.500 | ")
    assert lines[3].count("%") == 6
    assert "6 windows a text" in lines[-1]
