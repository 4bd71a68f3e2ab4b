"""Memory of a calibration: waves of experts keep to their budget, and nothing grows with samples or layers.

Rows lie in files and one layer is in memory. Tensors are counted byte by byte, whatever the allocator keeps: so this
holds for a GPU's memory as for a host's, as far as both run the same code. Resident memory is measured beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calibrated_runs import compress, experts, options, recipe, write_ids
from calibration_memory_run import MemoryFigures, ResidentFigures, Size, resident_growth, tensor_memory
from rank_processes import started_ranks
from tiny_checkpoints import make_checkpoint

from memopt.errors import UsageError

MIB = 2**20
BASE = Size()
SIZES = {
    "more layers and samples": Size(num_layers=3, num_samples=4 * BASE.num_samples),
    "twice the experts": Size(num_experts=2 * BASE.num_experts),
    # The others get some of theirs for coverage.
    "two experts get all tokens": Size(is_crowded=True, coverage_tokens=256),
}
# Several waves, but for `weighted` at the base size.
BUDGETS = {"gptq": 9 * MIB, "weighted": 7 * MIB}
# Eight experts of sixteen at a time, with so few tokens that most of it is Hessians.
SMALL = Size(num_samples=4)
SMALL_BUDGET = int(4.8 * MIB)
# KV pages of a batch, and the rotary table.
KV_BYTES = MIB
# What the allocator and the interpreter keep may differ by this much from run to run.
SLACK_BYTES = 6 * MIB
# For a machine that does much else.
TIMEOUT_SECONDS = 600


def measured(folder: Path, method: str, size: Size, budget_bytes: int, experts_more: int = 1) -> MemoryFigures:
    figures = alone(tensor_memory, folder, method, size, budget_bytes, experts_more)
    assert isinstance(figures, MemoryFigures), figures
    return figures


def alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns in a process of its own."""
    with started_ranks(1, work, *arguments) as ranks:
        return ranks.result(0, TIMEOUT_SECONDS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MemoryFigures]:
    return {
        method: measured(tmp_path_factory.mktemp(method), method, BASE, budget) for method, budget in BUDGETS.items()
    }


def keeps_to(budget_bytes: int, figures: MemoryFigures) -> bool:
    """Every wave by itself; and the whole run, beside the layer that is in memory and its KV pages."""
    outside = figures.layer_bytes + KV_BYTES
    return max(figures.wave_peaks) <= budget_bytes and figures.peak_bytes <= outside + budget_bytes


@pytest.mark.parametrize("method", BUDGETS)
def test_waves_keep_to_the_budget(method: str, base: dict[str, MemoryFigures]) -> None:
    assert keeps_to(BUDGETS[method], base[method])


@pytest.mark.parametrize(
    ("method", "name"), [*(("gptq", name) for name in SIZES), ("weighted", "more layers and samples")]
)
def test_at_other_sizes_too(method: str, name: str, base: dict[str, MemoryFigures], tmp_path: Path) -> None:
    size = SIZES[name]
    figures = measured(tmp_path, method, size, BUDGETS[method])
    assert len(figures.wave_peaks) > size.num_layers - 1
    assert keeps_to(BUDGETS[method], figures)
    if name == "more layers and samples":
        # One file of rows is 4 MiB there.
        assert figures.peak_bytes < base[method].peak_bytes + MIB


def test_twice_the_experts_that_fit_would_not_keep_to_it(tmp_path: Path) -> None:
    for experts_more, fits in ((1, True), (2, False)):
        folder = tmp_path / str(experts_more)
        folder.mkdir()
        figures = measured(folder, "gptq", SMALL, SMALL_BUDGET, experts_more)
        assert len(figures.wave_peaks) == 2 // experts_more
        assert keeps_to(SMALL_BUDGET, figures) == fits


def test_resident_memory_follows_neither_samples_nor_layers(tmp_path: Path) -> None:
    sizes = (Size(num_samples=32, num_experts=4), Size(num_layers=4, num_samples=256, num_experts=4))
    grown: list[int] = []
    for size in sizes:
        folder = tmp_path / str(size.num_samples)
        folder.mkdir()
        figures = alone(resident_growth, folder, "gptq", size, BUDGETS["gptq"])
        assert isinstance(figures, ResidentFigures), figures
        assert figures.growth_bytes < figures.layer_bytes + BUDGETS["gptq"] + SLACK_BYTES
        grown.append(figures.growth_bytes)
    # Three files of rows are there at once; in memory the growth of one alone would show.
    assert sizes[1].rows_bytes - sizes[0].rows_bytes > 2 * SLACK_BYTES
    assert grown[1] < grown[0] + SLACK_BYTES


def test_a_budget_that_is_too_small_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "glm-4.7-fp8", num_nextn_predict_layers=0)
    dense = {"roles": ["attention"], "format": {"type": "int4", "method": "gptq"}}
    for rule, what in ((experts("gptq"), "one expert"), (dense, "model.layers.0.self_attn")):
        form = recipe([rule], "glm4_moe")
        data = write_ids(tmp_path / "ids.safetensors")
        with pytest.raises(UsageError, match=what) as refusal:
            compress(source, tmp_path / what, form, options(data, memory_bytes=MIB))
        assert "use --calibration-memory" in str(refusal.value)
        assert not (tmp_path / what).exists()
