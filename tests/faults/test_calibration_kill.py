"""Kill -9 while a release is calibrated: a rerun goes on with the layer that was not finished, to the same bytes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from calibrated_runs import COVERAGE_TOKENS, NUM_SAMPLES, SAMPLE_TOKENS, experts, recipe, write_ids
from cli.invoke import command, run_command

from faults.small_source import FLAGS, make_small_source
from faults.trees import tree
from memopt.compressor.calibration_store import CALIBRATION_FOLDER
from memopt.compressor.output_folder import STATE_FOLDER

POLL_SECONDS = 0.001


def _kill_when(condition: Callable[[], bool], arguments: tuple[object, ...]) -> int:
    child = subprocess.Popen(command(*arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while child.poll() is None and not condition():
            time.sleep(POLL_SECONDS)
    finally:
        child.kill()
    return child.wait(timeout=60)


def test_kills_in_every_phase_leave_the_same_bytes_and_no_finished_layer_is_done_again(tmp_path: Path) -> None:
    source = make_small_source(tmp_path / "source")
    data = write_ids(tmp_path / "ids.safetensors")
    form = tmp_path / "recipe.yaml"
    form.write_text(yaml.safe_dump(recipe([experts("gptq")]).model_dump(mode="json", exclude_none=True)))
    numbers = {"--samples": NUM_SAMPLES, "--seq-len": SAMPLE_TOKENS, "--coverage-tokens": COVERAGE_TOKENS}
    flags = [text for pair in numbers.items() for text in map(str, pair)]

    def arguments(out: Path) -> tuple[object, ...]:
        more = ("--recipe", form, "--calibration", data, "--calibration-device", "cpu", *flags)
        return ("compress", source, out, *FLAGS, *more)

    expected, out = tmp_path / "expected", tmp_path / "out"
    assert run_command(*arguments(expected)).code == 0
    store = out / STATE_FOLDER / CALIBRATION_FOLDER
    moments = {
        "first rows": lambda: (store / "hidden-00000").exists(),
        "a layer is done": (store / "layer-00000.json").exists,
        "an MTP layer's part": lambda: any(store.glob("layer-00002.*.safetensors")),
        "units": lambda: any((out / STATE_FOLDER / "units").glob("*.json")),
    }
    done: dict[str, int] = {}
    for moment, condition in moments.items():
        assert _kill_when(condition, arguments(out)) == -9, moment
        now = {path.name: path.stat().st_ino for path in store.glob("layer-*.json")}
        assert done.items() <= now.items(), f"a finished layer was done again before: {moment}"
        done = now
    assert len(done) == 3
    assert run_command(*arguments(out)).code == 0
    assert tree(out) == tree(expected)
    assert not (out / STATE_FOLDER).exists()
