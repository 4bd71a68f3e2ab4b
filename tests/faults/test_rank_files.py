"""Rank files when something goes wrong: interrupted, touched, swapped, flipped; the rerun ends with the same bytes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refusal
from signing_keys import fixed_key

import memopt
from faults.small_source import RANK_OPTIONS, compress
from faults.test_disk_full import Usage
from faults.test_resume import Stop
from faults.trees import finished_files, stamps, tree
from memopt.compressor import pipeline
from memopt.compressor.output_folder import STATE_FOLDER
from memopt.compressor.progress import Progress
from memopt.errors import ContentError, DiskFullError, LayoutError, OutputError, SourceChangedError
from memopt.manifests.policy import policy_for_key
from memopt.manifests.safetensors_header import read_header
from memopt.manifests.signer import KeySigner

# Runs a job of two ranks into a folder; options are those of the public functions.
Run = Callable[..., Any]


@pytest.fixture(scope="session")
def releases(shared_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small source's releases `hub`, `both` and `tp`; no test may change them."""
    folder = tmp_path_factory.mktemp("releases")
    compress(shared_source, folder / "both", options=RANK_OPTIONS)
    memopt.merge(folder / "both", folder / "hub")
    memopt.shard(folder / "hub", folder / "tp", tensor_parallel=2, layout="tp")
    return folder


@pytest.fixture(params=["compress", "shard", "merge"])
def job(request: pytest.FixtureRequest, releases: Path, source: Path, tmp_path: Path) -> tuple[Run, Path, Path]:
    """How to run one of the three jobs, its source (a test's own copy), and the release that it must make."""
    if request.param == "compress":

        def run(out: Path, **options: Any) -> Any:
            return compress(source, out, **{"options": RANK_OPTIONS, **options})

        return run, source, releases / "both"
    copy = tmp_path / "release"
    shutil.copytree(releases / ("hub" if request.param == "shard" else "tp"), copy)

    def run_on_release(out: Path, **options: Any) -> Any:
        chosen = {"tensor_parallel": 2} if request.param == "shard" else {}
        return getattr(memopt, request.param)(copy, out, workers=1, **chosen, **options)

    return run_on_release, copy, releases / ("both" if request.param == "shard" else "hub")


Job = tuple[Run, Path, Path]


def interrupt(run: Run, out: Path) -> set[str]:
    """Run until some units are finished; the names of all their files."""

    def stop(progress: Progress) -> None:
        if progress.num_done_units >= 3:
            raise Stop

    with pytest.raises(Stop):
        run(out, progress=stop)
    return finished_files(out)


def flip(path: Path, place: int = -1) -> None:
    """Turn one bit of the byte at `place`; the last one belongs to a tensor."""
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


def test_finished_units_are_kept_with_all_their_files(job: Job, tmp_path: Path) -> None:
    run, _, made = job
    out = tmp_path / "out"
    finished = interrupt(run, out)
    before = stamps(out, finished)
    result = run(out)
    assert result.num_resumed_units >= 3
    assert stamps(out, finished) == before
    assert tree(out) == tree(made)
    assert run(out).was_complete


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 100), flip])
def test_a_unit_with_a_spoiled_file_is_made_again(damage: Callable[[Path], None], job: Job, tmp_path: Path) -> None:
    run, _, made = job
    out = tmp_path / "out"
    finished = interrupt(run, out)
    num_units = len(list((out / STATE_FOLDER / "units").glob("*.json")))
    damage(out / max(finished))
    assert run(out).num_resumed_units == num_units - 1
    assert tree(out) == tree(made)


def test_a_file_that_was_only_touched_is_hashed_and_kept(job: Job, tmp_path: Path) -> None:
    run, _, made = job
    out = tmp_path / "out"
    finished = interrupt(run, out)
    num_units = len(list((out / STATE_FOLDER / "units").glob("*.json")))
    os.utime(out / max(finished), ns=(1, 1))
    before = stamps(out, finished)
    assert run(out).num_resumed_units == num_units
    assert stamps(out, finished) == before
    assert tree(out) == tree(made)


def test_a_source_that_changed_in_between_is_refused(job: Job, tmp_path: Path) -> None:
    run, source, _ = job
    out = tmp_path / "out"
    interrupt(run, out)
    for path in source.rglob("*.safetensors"):
        flip(path, read_header(path).data_start)
    with pytest.raises(ContentError) as caught:
        run(out)
    assert caught.value.tensor is not None
    assert "safetensors" in str(caught.value.file)


def test_other_layouts_are_other_work(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupt(lambda out, **options: compress(source, out, options=RANK_OPTIONS, **options), out)
    with refusal(OutputError, "unfinished work"):
        compress(source, out)
    shutil.rmtree(out)
    compress(source, out)
    with refusal(OutputError, "finished release of another"):
        compress(source, out, options=RANK_OPTIONS)


@pytest.mark.parametrize("name", ["both", "tp"])
def test_a_flipped_bit_in_a_finished_rank_file_is_named(name: str, releases: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(releases / name, out)
    path = sorted((out / "tp2" / "rank-1").glob("*.safetensors"))[0]
    last = read_header(path).tensors[-1].name
    flip(path)
    with refusal(ContentError, last, f"tp2/rank-1/{path.name}", "was changed after it was written"):
        memopt.shard(releases / "hub", out, tensor_parallel=2, layout=name)  # type: ignore[arg-type]


def test_a_stray_file_in_a_rank_folder_is_named(releases: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(releases / "both", out)
    (out / "tp2" / "rank-0" / "stray.safetensors").write_bytes(b"x")
    with refusal(LayoutError, "tp2/rank-0/stray.safetensors", "nothing of memopt made it"):
        compress(source, out, options=RANK_OPTIONS)
    shutil.rmtree(out)
    interrupt(lambda out, **options: compress(source, out, options=RANK_OPTIONS, **options), out)
    (out / "tp2" / "stray.safetensors").write_bytes(b"x")
    with refusal(OutputError, "tp2/stray.safetensors"):
        compress(source, out, options=RANK_OPTIONS)


def test_rank_files_count_as_space_to_come(
    source: Path, releases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(path.stat().st_size for path in (releases / "both").rglob("*") if path.is_file())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(whole, 1, whole - 1))
    with refusal(DiskFullError, f"{whole:,} bytes are still to be written"):
        compress(source, tmp_path / "out", options=RANK_OPTIONS)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(whole, 0, whole))
    assert compress(source, tmp_path / "out", options=RANK_OPTIONS).total_size_bytes == whole


def test_a_flipped_bit_in_the_release_is_refused_and_named(job: Job, tmp_path: Path) -> None:
    run, source, _ = job
    if not (source / "release.json").exists():
        # A plain checkpoint has no digests to compare with: it is compressed as it is.
        assert run(tmp_path / "out").num_units
        return
    path = sorted(source.rglob("*.safetensors"))[-1]
    last = read_header(path).tensors[-1].name
    flip(path)
    with refusal(ContentError, last, str(path.relative_to(source)), "ledger.jsonl", "fetch"):
        run(tmp_path / "out")
    assert not (tmp_path / "out" / "release.json").exists()
    flip(path)
    run(tmp_path / "out")


@pytest.mark.parametrize("name", ["both", "tp"])
def test_swapped_ranks_are_named_as_such(name: str, releases: Path, tmp_path: Path) -> None:
    swapped = tmp_path / "swapped"
    shutil.copytree(releases / name, swapped)
    (swapped / "tp2" / "rank-0").rename(swapped / "x")
    (swapped / "tp2" / "rank-1").rename(swapped / "tp2" / "rank-0")
    (swapped / "x").rename(swapped / "tp2" / "rank-1")
    with refusal(LayoutError, "holds rank 1 of tp2, but lies at rank 0: rank files were swapped"):
        memopt.merge(swapped, tmp_path / "out")
    assert not list(tmp_path.glob("out/*.safetensors"))


def test_a_header_that_differs_is_named(releases: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(releases / "hub", spoiled)
    first, second = sorted(spoiled.glob("*.safetensors"))[:2]
    raw = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with refusal(ContentError, first.name, "its header is not the one that ledger.jsonl gives it"):
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)
    first.write_bytes(raw + b"x")
    with pytest.raises(ContentError, match="bytes, the ledger gives it"):
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)
    first.unlink()
    with pytest.raises(LayoutError, match="is missing"):
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)


def test_a_release_that_is_touched_while_it_is_read_is_refused(releases: Path, tmp_path: Path) -> None:
    copy = tmp_path / "release"
    shutil.copytree(releases / "hub", copy)

    def touch(progress: Progress) -> None:
        os.utime(copy / "ledger.jsonl", ns=(1, 1))

    with refusal(SourceChangedError, "ledger.jsonl", "changed while it was read"):
        memopt.shard(copy, tmp_path / "out", tensor_parallel=2, workers=1, progress=touch)
    assert not (tmp_path / "out" / "release.json").exists()
    assert memopt.shard(copy, tmp_path / "out", tensor_parallel=2).num_resumed_units


@pytest.mark.parametrize("limit", [1024, 80])
def test_few_open_files_only_mean_fewer_threads(
    limit: int, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _, made = job
    monkeypatch.setattr(pipeline.resource, "getrlimit", lambda _: (limit, limit))
    run(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(made)


def test_a_rank_is_ready_for_an_init_container(releases: Path, tmp_path: Path) -> None:
    """Signed, the release verifies whole and rank by rank, with the other rank's files away."""
    out = tmp_path / "out"
    shutil.copytree(releases / "both", out)
    memopt.sign_release(out, [KeySigner(fixed_key())])
    policy = policy_for_key(fixed_key().public_key)
    assert memopt.verify_release(out, policy).is_ok
    shutil.rmtree(out / "tp2" / "rank-0")
    verdict = memopt.verify_release(out, policy, memopt.VerifyOptions(ranks=(1,)))
    assert verdict.is_ok, verdict.findings
