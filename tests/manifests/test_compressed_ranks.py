"""Releases that `memopt compress` writes with rank files: signed, verified, loaded by rank, refused when swapped."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from opened_releases import opened
from refusals import refusal
from tiny_checkpoints import TINY_GLM5
from tiny_ranks import swap
from tiny_releases import NOW, POLICY, flip_byte, same_tensors, sign

import memopt
from memopt.errors import ContentError, LayoutError
from memopt.manifests.ledger_output import CUT_AXES, EXPERT, SLICE_SHAPE, LedgerOutput, ledger_outputs
from memopt.manifests.verify import VerifyOptions, verify_release

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "layout": "both"},
    "tp4": {"tensor_parallel": 4, "layout": "tp"},
    "ep2": {"expert_parallel": 2, "layout": "both"},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def original(layout: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of several files a rank; not to be changed."""
    folder = tmp_path_factory.mktemp("compressed") / "release"
    memopt.compress(TINY_GLM5, folder, options=memopt.PlanOptions(max_file_bytes=4_000_000, **LAYOUTS[layout]))
    return sign(folder)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "release")


def outputs_of(folder: Path) -> list[LedgerOutput]:
    return list(ledger_outputs(iter((folder / "ledger.jsonl").read_bytes().splitlines())))


def test_the_ranks_put_together_are_the_hub(original: Path, layout: str) -> None:
    verdict = verify_release(original, POLICY, VerifyOptions(now=NOW))
    assert verdict.is_ok, verdict.findings
    outputs = outputs_of(original)
    assert {output.ranks.cut for output in outputs if output.ranks} >= {"rows", "columns", "replicated"}
    with opened(original) as release:
        ranks = [release.load(rank=rank) for rank in release.ranks]
    assert len(ranks) == int(layout[2:])
    for output in outputs:
        name, slices = output.tensor.name, output.ranks
        assert slices is not None
        parts = [rank[name] for rank in ranks if name in rank]
        if slices.cut in CUT_AXES:
            whole = torch.cat([part.view(torch.uint8) if part.dim() else part for part in parts], CUT_AXES[slices.cut])
            whole = whole.view(parts[0].dtype)
        else:
            assert len(parts) == (1 if slices.cut == EXPERT else len(ranks))
            assert all(same_tensors({name: part}, {name: parts[0]}) for part in parts)
            whole = parts[0]
        assert tuple(whole.shape) == output.tensor.shape
        if slices.cut != SLICE_SHAPE:
            raw = whole.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert hashlib.sha256(raw).hexdigest() == output.sha256


def test_one_rank_is_enough(folder: Path, layout: str) -> None:
    with opened(folder) as release:
        expected = release.load(rank=1)
    for path in folder.rglob("*.safetensors*"):
        if path.parent.name != "rank-1":
            path.unlink()
    verdict = verify_release(folder, POLICY, VerifyOptions(ranks=(1,), now=NOW))
    assert (verdict.is_ok, verdict.is_partial) == (True, True), verdict.findings
    with opened(folder) as release:
        assert same_tensors(release.load(rank=1), expected)


def same_size_files(folder: Path, layout: str) -> tuple[str, str]:
    """Files of the same number at ranks 0 and 1."""
    name = sorted(path.name for path in (folder / layout / "rank-0").glob("*.safetensors"))[-1]
    return f"{layout}/rank-0/{name}", f"{layout}/rank-1/{name}"


def test_swapped_after_signing(folder: Path, layout: str) -> None:
    first, second = same_size_files(folder, layout)
    swap(folder / first, folder / second)
    verdict = verify_release(folder, POLICY, VerifyOptions(now=NOW))
    assert {finding.file: finding.message for finding in verdict.findings} == {
        first: f"its bytes are those signed for {second}: the two files were swapped",
        second: f"its bytes are those signed for {first}: the two files were swapped",
    }
    with opened(folder) as release, refusal(ContentError, "the two files were swapped"):
        release.load(rank=0)


def test_swapped_or_changed_before_signing(folder: Path, layout: str) -> None:
    first, second = same_size_files(folder, layout)
    swap(folder / first, folder / second)
    with refusal(LayoutError, first, f"holds rank 1 of {layout}, but lies at rank 0: rank files were swapped"):
        sign(folder)
    swap(folder / first, folder / second)
    flip_byte(folder / second, -1)
    with refusal(ContentError, second, "not those that ledger.jsonl names"):
        sign(folder)
    (folder / second).unlink()
    with pytest.raises(LayoutError, match=second.rsplit("/", 1)[-1]):
        sign(folder)
