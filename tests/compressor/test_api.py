"""The public functions: names, types, defaults, and the way there and back."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from faults.small_source import EXPERT, OPTIONS, compress, make_small_source
from safetensors import safe_open
from tiny_checkpoints import make_checkpoint

import memopt
from memopt.compressor import api
from memopt.compressor.progress import Progress
from memopt.errors import ConfigError, MissingFileError, RecipeError, UnsupportedError, UsageError


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_source(tmp_path_factory.mktemp("api") / "source")


def _tensor(folder: Path, name: str) -> torch.Tensor:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118 (not a mapping)
                tensor: torch.Tensor = opened.get_tensor(name)
                return tensor
    raise KeyError(name)


def test_every_public_name_is_there_and_documented() -> None:
    assert dir(memopt) == sorted(memopt.__all__)
    for name in memopt.__all__:
        value = getattr(memopt, name)
        assert name == "__version__" or inspect.getdoc(value), name
    with pytest.raises(AttributeError, match="has no attribute 'decompress'"):
        _ = memopt.decompress  # type: ignore[attr-defined]


def test_import_is_light() -> None:
    code = "import sys, memopt; print([m for m in ('torch', 'numpy', 'numba', 'rich', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_compress_does_not_import_torch(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys, memopt; options = memopt.PlanOptions(tensor_parallel=1);"
        "memopt.compress(sys.argv[1], sys.argv[2], options=options, device='cpu'); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, source, tmp_path / "out"], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_paths_may_be_text(source: Path, tmp_path: Path) -> None:
    result = memopt.compress(str(source), str(tmp_path / "out"), options=OPTIONS, workers=1)
    assert isinstance(result, memopt.RunResult)
    assert result.out == tmp_path / "out"
    assert (result.num_resumed_units, result.was_complete) == (0, False)


def test_progress_comes_in_order_and_ends_whole(source: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    result = compress(source, tmp_path / "out", workers=3, progress=seen.append)
    assert [progress.num_done_units for progress in seen] == sorted(progress.num_done_units for progress in seen)
    last = seen[-1]
    assert (last.num_done_units, last.num_units) == (result.num_units, result.num_units)
    assert last.done_bytes == last.total_bytes == result.input_size_bytes


def test_a_callback_that_raises_ends_the_run_and_it_can_go_on(source: Path, tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError("the caller's own fault")

    with pytest.raises(ZeroDivisionError, match="the caller's own fault"):
        compress(source, tmp_path / "out", progress=fail)
    assert compress(source, tmp_path / "out").num_resumed_units >= 1


def test_recipes_come_as_name_file_object_or_default(source: Path, tmp_path: Path) -> None:
    recipe = memopt.load_recipe("glm-5.1-int4")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: glm-5.1-int4\ndescription: x\nfamilies: [glm_moe_dsa]\nrules:\n"
        "  - roles: [routed_expert]\n    format: {type: int4}\ndefault: bf16\n"
    )
    by_name = memopt.plan(source, "glm-5.1-int4", options=OPTIONS)
    assert memopt.plan(source, recipe, options=OPTIONS).units == by_name.units
    assert memopt.plan(source, file, options=OPTIONS).units == by_name.units
    assert memopt.plan(source, options=OPTIONS).recipe.name == api.DEFAULT_RECIPES["glm_moe_dsa"]
    with pytest.raises(RecipeError, match="there is no recipe 'mine'"):
        memopt.plan(source, "mine")


def test_there_and_back_is_what_the_codes_say(source: Path, tmp_path: Path) -> None:
    compress(source, tmp_path / "int4")
    memopt.dequantize(tmp_path / "int4", tmp_path / "bf16")
    memopt.dequantize(source, tmp_path / "oracle")
    back, truth = _tensor(tmp_path / "bf16", EXPERT), _tensor(tmp_path / "oracle", EXPERT)
    assert back.dtype == truth.dtype == torch.bfloat16
    error = (back.float() - truth.float()).square().sum() / truth.float().square().sum()
    assert 0.001 < error < 0.02
    scale = _tensor(tmp_path / "int4", EXPERT.replace("weight", "weight_scale")).float()
    steps = back.float().reshape(scale.shape[0], scale.shape[1], -1) / scale[:, :, None]
    # The product of code and scale was rounded to BF16 (8 bits).
    assert (steps - steps.round()).abs().max() < 8 * 2**-8
    assert (steps.round().min(), steps.round().max()) == (-8, 7)
    assert memopt.inspect(tmp_path / "bf16").problems == ()


def test_plan_config_needs_no_weights(source: Path) -> None:
    from_config = memopt.plan_config(source / "config.json", options=OPTIONS)
    from_folder = memopt.plan(source, options=OPTIONS)
    assert [unit.hub_file.header for unit in from_config.units] == [unit.hub_file.header for unit in from_folder.units]
    assert from_config.source.folder is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ConfigError),
        ("[]", ConfigError),
        ('{"model_type": 5}', ConfigError),
        ('{"model_type": "llama"}', UnsupportedError),
        ('{"model_type": "kimi_k2"}', ConfigError),
        (None, MissingFileError),
    ],
)
def test_configs_that_cannot_be_planned(text: str | None, error: type[Exception], tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=r"config\.json"):
        memopt.plan_config(tmp_path / "config.json")


def test_names_that_are_empty(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="the output has no name"):
        memopt.compress(source, "")
    with pytest.raises(UsageError, match="the source has no name"):
        memopt.compress("", tmp_path / "out")


def test_cuda_is_refused_where_there_is_none(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="there is no CUDA device"):
        compress(source, tmp_path / "out", device="cuda")
    assert not (tmp_path / "out").exists()


def test_workers_are_as_many_as_cores() -> None:
    assert api.default_workers() >= 1


def test_int4_passes_through_dequantize_of_a_native_checkpoint(tmp_path: Path) -> None:
    native = make_checkpoint(tmp_path / "native", "kimi-k2.6-int4")
    memopt.dequantize(native, tmp_path / "bf16")
    found = memopt.inspect(tmp_path / "bf16")
    assert (found.problems, {row.format for row in found.roles}) == ((), {"BF16", "F32"})
