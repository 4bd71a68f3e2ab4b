"""Release.load_into: a model's own tensors are filled with verified bytes, or zeroed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from opened_releases import EMBED, hub_tensors, opened, whole_file_release
from refusals import refusal
from tiny_releases import (
    SHARDS,
    THREE_CHUNKS,
    flip_byte,
    rank_tensors,
    same_tensors,
    signed_release,
)

from memopt.errors import (
    MissingTensorError,
    UsageError,
)
from memopt.manifests.verified_reader import BadChunkError


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release whose shards have three chunks; not to be changed."""
    return signed_release(tmp_path_factory.mktemp("big") / "release", rows=THREE_CHUNKS)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return signed_release(tmp_path / "release")


def destinations(folder: Path) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 1) for name, tensor in hub_tensors(folder).items()}


@pytest.mark.parametrize("jobs", [1, 3])
def test_load_into_a_models_own_tensors(big: Path, jobs: int) -> None:
    model = destinations(big)
    pointers = {name: tensor.data_ptr() for name, tensor in model.items()}
    with opened(big, jobs=jobs) as release:
        release.load_into(model)
        assert same_tensors(model, hub_tensors(big))
        assert {name: tensor.data_ptr() for name, tensor in model.items()} == pointers
        one = {EMBED: torch.zeros_like(model[EMBED])}
        release.load_into(one)
        assert same_tensors(one, {EMBED: model[EMBED]})
        release.load_into({name: tensor.to("meta") for name, tensor in model.items()})
        parameter = torch.nn.Parameter(torch.zeros_like(model[EMBED]))
        release.load_into({EMBED: parameter})
        assert same_tensors({EMBED: parameter.data}, {EMBED: model[EMBED]})


def test_load_into_zeroes_what_it_wrote_before_an_error(big: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(big, tmp_path / "copy")
    flip_byte(copy / SHARDS[1], -1)
    model = destinations(copy)
    model[EMBED] = torch.nn.Parameter(model[EMBED])
    with opened(copy) as release, pytest.raises(BadChunkError):
        release.load_into(model)
    assert not any(tensor.float().any() for tensor in model.values())


def test_load_into_refuses_other_kinds_before_it_writes(small: Path) -> None:
    with opened(small) as release:
        for bend in (lambda t: t.float(), lambda t: t[:, :3], lambda t: torch.empty(1, 256, dtype=t.dtype)[:, ::2]):
            model = destinations(small)
            before = {name: tensor.clone() for name, tensor in model.items()}
            odd = bend(model[EMBED])
            with pytest.raises(UsageError, match=EMBED):
                release.load_into(model | {EMBED: odd})
            assert same_tensors(model, before)
        with refusal(MissingTensorError, "absent"):
            release.load_into({"absent": torch.zeros(1)})


def test_load_into_for_a_rank_and_without_chunks(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release", rows=8, num_ranks=4)
    expected = rank_tensors(0, 8, 3, 4) | rank_tensors(1, 8, 3, 4)
    model = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with opened(folder) as release:
        release.load_into(model, rank=3)
    assert same_tensors(model, expected)
    whole = whole_file_release(tmp_path / "whole")
    model = destinations(whole)
    with opened(whole) as release:
        release.load_into(model)
    assert same_tensors(model, hub_tensors(whole))
