"""What else lies in the folder of a release that is sharded, and a release that is changed while it is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.small_source import EXPERT_SCALE, RANK_OPTIONS, compress, edit_tensor, make_small_source
from faults.trees import tree
from refusals import refusal
from signing_keys import fixed_key

import memopt
from memopt.compressor.ranks.ledger_file import LedgerFile, span_of
from memopt.compressor.ranks.released import ReleasedPlan
from memopt.errors import ContentError, LayoutError, SourceChangedError
from memopt.manifests.policy import TrustedKey, TrustPolicy
from memopt.manifests.signer import KeySigner


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release with hub files and two ranks; read only."""
    folder = tmp_path_factory.mktemp("both")
    compress(make_small_source(folder / "source"), folder / "both", options=RANK_OPTIONS)
    return folder / "both"


@pytest.fixture
def hub(both: Path, tmp_path: Path) -> Path:
    """A hub release of the test's own."""
    return memopt.merge(both, tmp_path / "hub").out


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


OWN_NAMES = (".cache/huggingface/x.lock", ".git/config", ".gitattributes", "README.md", "quality.json", "report.html")


def test_what_is_about_the_release_alone_stays_behind_and_is_told(hub: Path, both: Path, tmp_path: Path) -> None:
    """A clone and a download bring them, an evaluation adds some; the weights' files are the same without."""
    for name in OWN_NAMES:
        write(hub / name, "x")
    result = memopt.shard(hub, tmp_path / "out", tensor_parallel=2)
    assert tree(tmp_path / "out") == tree(both)
    assert result.left_behind == (".cache/", ".git/", ".gitattributes", "README.md", "quality.json", "report.html")
    assert memopt.shard(hub, tmp_path / "out", tensor_parallel=2).was_complete
    assert memopt.merge(both, tmp_path / "merged").left_behind == ()


def test_a_run_that_is_not_finished_is_no_release(hub: Path, tmp_path: Path) -> None:
    (hub / ".memopt").mkdir()
    with refusal(LayoutError, ".memopt/", "has not finished this release", "run its command again"):
        memopt.shard(hub, tmp_path / "out", tensor_parallel=2)


EXTRA = ("NOTICE.txt", "figure.png", "logs")


def test_a_small_file_that_nobody_signed_is_not_copied_from_a_verified_release(
    hub: Path, both: Path, tmp_path: Path
) -> None:
    memopt.sign_release(hub, [KeySigner(fixed_key())])
    write(hub / "NOTICE.txt", "x")
    write(hub / "figure.png", "x")
    write(hub / "logs" / "x", "x")
    with refusal(LayoutError, "NOTICE.txt", "not listed by the signed release"):
        memopt.shard(hub, tmp_path / "out", tensor_parallel=2, key=fixed_key().public_key)
    policy = TrustPolicy(keys=(TrustedKey(fixed_key().public_key),), allowed_extra_paths=EXTRA)
    result = memopt.shard(hub, tmp_path / "out", tensor_parallel=2, policy=policy)
    assert result.left_behind == ("NOTICE.txt", "figure.png", "logs/")
    assert tree(tmp_path / "out") == tree(both)


def test_a_ledger_that_is_exchanged_after_it_was_checked_is_refused(hub: Path) -> None:
    """Also in a field that nothing else is compared with."""
    plan = ReleasedPlan(hub, lambda name: (hub / name).read_bytes())
    path = hub / "ledger.jsonl"
    raw = path.read_bytes()
    first, last = plan.units[0], plan.units[-1]
    path.write_bytes(raw.replace(b'"mtp": false', b'"mtp":  true', 1))
    with refusal(SourceChangedError, "ledger.jsonl", "changed while it was read"):
        plan.rows(first)
    assert plan.rows(last)
    path.write_bytes(raw[: len(raw) // 2])
    with refusal(SourceChangedError, "ledger.jsonl", "changed while it was read"):
        plan.lines(last)
    path.write_bytes(raw)
    assert b"".join(line for unit in plan.units for line in plan.lines(unit)) + b"".join(plan.tail_lines()) == raw


def _exchange(path: Path) -> Callable[[object], None]:
    raw = path.read_bytes()
    assert b'"role": "norm"' in raw

    def exchange(_: object) -> None:
        path.write_bytes(raw.replace(b'"role": "norm"', b'"role": "Norm"'))

    return exchange


def test_a_ledger_that_is_exchanged_during_the_run_makes_no_release(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceChangedError):
        memopt.shard(hub, tmp_path / "out", tensor_parallel=2, workers=1, progress=_exchange(hub / "ledger.jsonl"))
    assert not (tmp_path / "out" / "release.json").exists()


def test_a_release_of_other_weights_is_not_taken_for_the_finished_one(both: Path, hub: Path, tmp_path: Path) -> None:
    """Checkpoints with equal headers have one plan; releases of both differ in the ledger alone."""
    source = tmp_path / "source"
    shutil.copytree(both.parent / "source", source)
    edit_tensor(source, EXPERT_SCALE, lambda raw: raw.reverse())
    other = compress(source, tmp_path / "other").out
    memopt.shard(hub, tmp_path / "out", tensor_parallel=2)
    with refusal(ContentError, "release.json", "made from another source", "name another output folder"):
        memopt.shard(other, tmp_path / "out", tensor_parallel=2)
    with refusal(ContentError, "release.json", "made from another source"):
        memopt.merge(both, other)
    assert tree(tmp_path / "out") == tree(both)


def test_the_scan_gives_places_and_digest(hub: Path) -> None:
    ledger = LedgerFile(hub)
    lines = list(ledger.scan())
    raw = (hub / "ledger.jsonl").read_bytes()
    assert raw[lines[3].start : lines[3].start + lines[3].size_bytes] == raw.splitlines(keepends=True)[3]
    assert ledger.read(span_of(lines[2:5])) == raw.splitlines(keepends=True)[2:5]
    assert ledger.read(span_of([])) == []
    assert ledger.sha256 in (hub / "release.json").read_text()
