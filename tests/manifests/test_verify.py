"""verify_release: everything that is wrong is listed, the worst gives the code, nothing is written or kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refusal
from release_files import contents, policy_json
from signing_keys import fixed_key
from tiny_releases import (
    IDENTITY,
    KEY,
    NOW,
    POLICY,
    SHARDS,
    THREE_CHUNKS,
    flip_byte,
    key_policy,
    sign_anyway,
    signed_release,
    write_index,
)

from memopt.errors import PolicyFileError, UsageError
from memopt.manifests.digest import CHUNK_SIZE_BYTES
from memopt.manifests.policy import policy_for_key
from memopt.manifests.safetensors_index import INDEX_NAME
from memopt.manifests.verdict import Verdict
from memopt.manifests.verify import VerifyOptions, verify_release


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release whose shards have three chunks; not to be changed."""
    return signed_release(tmp_path_factory.mktemp("big") / "release", rows=THREE_CHUNKS, num_ranks=2)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return signed_release(tmp_path / "release")


@pytest.fixture
def copy(big: Path, tmp_path: Path) -> Path:
    shutil.copytree(big, tmp_path / "copy")
    return tmp_path / "copy"


def check(folder: Path, policy: object = POLICY, **options: object) -> Verdict:
    return verify_release(folder, policy, VerifyOptions(**({"now": NOW} | options)))  # type: ignore[arg-type]


def found(verdict: Verdict) -> list[tuple[int, str | None]]:
    return [(finding.exit_code, finding.file) for finding in verdict.findings]


@pytest.mark.parametrize("jobs", [1, 2, 7])
def test_a_good_release(big: Path, jobs: int) -> None:
    before = contents(big)
    verdict = check(big, jobs=jobs)
    assert (verdict.is_ok, verdict.exit_code, verdict.findings, verdict.warnings) == (True, 0, (), ())
    assert (verdict.identity, verdict.counter, verdict.key_hints) == (IDENTITY, 7, (KEY.public_key.hint,))
    names = [path for path in big.rglob("*") if path.is_file() and path.name != "model.sig"]
    assert verdict.num_files == verdict.num_verified_files == len(names)
    assert verdict.verified_bytes == sum(path.stat().st_size for path in names)
    assert not verdict.is_partial
    assert contents(big) == before


@pytest.mark.parametrize(
    ("offset", "chunk"),
    [
        (100, 0),
        (CHUNK_SIZE_BYTES - 1, 0),
        (CHUNK_SIZE_BYTES, 1),
        (CHUNK_SIZE_BYTES + 1, 1),
        (2 * CHUNK_SIZE_BYTES, 2),
        (-1, 2),
    ],
)
def test_a_flipped_bit_is_named_by_chunk_and_offsets(copy: Path, offset: int, chunk: int) -> None:
    flip_byte(copy / SHARDS[0], offset)
    verdict = check(copy)
    assert (verdict.exit_code, found(verdict)) == (4, [(4, SHARDS[0])])
    finding = verdict.findings[0]
    size = (copy / SHARDS[0]).stat().st_size
    assert (finding.chunk, finding.start_bytes) == (chunk, chunk * CHUNK_SIZE_BYTES)
    assert finding.end_bytes == min(size, (chunk + 1) * CHUNK_SIZE_BYTES)
    assert f"chunk {chunk} " in finding.message


def test_everything_is_listed_and_the_worst_gives_the_code(copy: Path) -> None:
    flip_byte(copy / SHARDS[0], 0)
    flip_byte(copy / SHARDS[1], -1)
    (copy / "tokenizer.json").write_text("{}")
    (copy / "config.json").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"")
    (copy / ".git").mkdir()
    (copy / ".git" / "hook.py").write_text("")
    os.symlink("config.json", copy / "link")
    verdict = check(copy)
    assert verdict.exit_code == 6
    assert set(found(verdict)) == {
        (4, SHARDS[0]),
        (4, SHARDS[1]),
        (4, "tokenizer.json"),
        (6, "config.json"),
        (6, "pytorch_model.bin"),
        (6, ".git/hook.py"),
        (6, "link"),
    }
    later = check(copy, key_policy(min_counters={IDENTITY: 8}))
    assert later.exit_code == 5
    assert set(found(verdict)) < set(found(later))


def test_after_a_bad_signature_nothing_else_is_believed(copy: Path) -> None:
    flip_byte(copy / SHARDS[0], 0)
    (copy / "extra").write_text("")
    verdict = check(copy, policy_for_key(fixed_key(2).public_key))
    assert (verdict.exit_code, len(verdict.findings), verdict.identity, verdict.num_files) == (3, 1, None, 0)


def test_many_bad_chunks_are_counted(tmp_path: Path) -> None:
    folder = signed_release(tmp_path / "release", rows=100 * 2**10)
    size = (folder / SHARDS[0]).stat().st_size
    os.truncate(folder / SHARDS[0], 0)
    os.truncate(folder / SHARDS[0], size)
    verdict = check(folder)
    findings = [finding for finding in verdict.findings if finding.file == SHARDS[0]]
    assert [finding.chunk for finding in findings] == [*range(8), None]
    assert f"{-(-size // CHUNK_SIZE_BYTES) - 8} more" in findings[-1].message
    assert verdict.exit_code == 4


@pytest.mark.parametrize("name", ["memopt.manifest.json", "memopt.chunks", "SHA256SUMS", "config.json", INDEX_NAME])
def test_a_changed_small_file_is_one_finding(copy: Path, name: str) -> None:
    flip_byte(copy / name, 10)
    verdict = check(copy)
    assert (verdict.exit_code, found(verdict)) == (4, [(4, name)])


@pytest.mark.parametrize("name", ["memopt.manifest.json", "memopt.chunks", "SHA256SUMS", "config.json", SHARDS[0]])
def test_a_missing_or_longer_file_is_one_finding(copy: Path, name: str) -> None:
    raw = (copy / name).read_bytes()
    (copy / name).write_bytes(raw + b" ")
    verdict = check(copy)
    assert (verdict.exit_code, found(verdict)) == (4, [(4, name)])
    (copy / name).unlink()
    verdict = check(copy)
    assert (verdict.exit_code, found(verdict)) == (6, [(6, name)])


def test_quick_reads_headers_but_not_weights(copy: Path) -> None:
    flip_byte(copy / SHARDS[0], -1)
    verdict = check(copy, quick=True)
    assert (verdict.is_ok, verdict.is_partial) == (True, True)
    assert verdict.num_verified_files < verdict.num_files
    flip_byte(copy / SHARDS[1], 20)
    assert found(check(copy, quick=True)) == [(4, SHARDS[1])]


def test_only_what_a_rank_needs(copy: Path) -> None:
    for name in (*SHARDS, INDEX_NAME):
        (copy / name).unlink()
    shutil.rmtree(copy / "tp2" / "rank-0")
    verdict = check(copy, ranks=(1,))
    assert (verdict.is_ok, verdict.is_partial) == (True, True)
    assert check(copy).exit_code == 6
    assert check(copy, ranks=(0, 1)).exit_code == 6
    (copy / "extra").write_text("")
    assert found(check(copy, ranks=(1,))) == [(6, "extra")]
    (copy / "extra").unlink()
    flip_byte(copy / "tp2" / "rank-1" / SHARDS[0], -1)
    assert check(copy, ranks=(1,)).exit_code == 4
    with refusal(UsageError, "no rank 2"):
        check(copy, ranks=(1, 2))


def test_ranks_of_a_release_without_rank_folders(small: Path) -> None:
    verdict = check(small, ranks=(3,))
    assert (verdict.is_ok, verdict.is_partial) == (True, False)


def test_warnings_refuse_under_strict(small: Path) -> None:
    (small / "empty").mkdir()
    os.link(small / "config.json", small.parent / "twin")
    verdict = check(small)
    assert verdict.is_ok
    assert [warning.split(":")[0] for warning in verdict.warnings] == ["config.json", "empty"]
    assert sorted(found(check(small, strict=True))) == [(6, "config.json"), (6, "empty")]


def test_allowed_extra_paths(small: Path) -> None:
    (small / "lost+found").mkdir()
    (small / "lost+found" / "x").write_text("")
    os.symlink("x", small / "lost+found" / "y")
    (small / "note.txt").write_text("")
    policy = key_policy(allowed_extra_paths=("lost+found", "note.txt"))
    assert check(small, policy).is_ok
    (small / "note.txt2").write_text("")
    assert found(check(small, policy)) == [(6, "note.txt2")]


def test_a_policy_file(small: Path, tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text(policy_json(identity="acme/other"))
    assert check(small, tmp_path / "trust.json").exit_code == 5
    (tmp_path / "trust.json").write_text("{}")
    with refusal(PolicyFileError, "schema"):
        check(small, str(tmp_path / "trust.json"))


def test_wrong_calls(small: Path) -> None:
    with refusal(UsageError, "nobody is trusted"):
        check(small, None)
    with refusal(UsageError, "no folder"):
        check(small / "gone")
    with refusal(UsageError, "jobs"):
        check(small, jobs=0)
    with refusal(UsageError, "empty list"):
        check(small, ranks=())
    with refusal(UsageError, "rank -1"):
        check(small, ranks=(-1,))


def test_a_linked_root(small: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(small)
    assert found(check(tmp_path / "link")) == [(6, str(tmp_path / "link"))]
    assert check(tmp_path / "link", allow_linked_root=True).is_ok


@pytest.mark.parametrize("word", ["missing", "empty", "folder", "Git-LFS"])
def test_a_signature_that_is_none(small: Path, word: str) -> None:
    signature = small / "model.sig"
    signature.unlink()
    if word == "empty":
        signature.write_bytes(b"")
    elif word == "folder":
        signature.mkdir()
    elif word == "Git-LFS":
        signature.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    verdict = check(small)
    assert (verdict.exit_code, found(verdict)) == (8, [(8, "model.sig")])
    assert word in verdict.findings[0].message


def test_nothing_leaks_into_the_next_call(small: Path, tmp_path: Path) -> None:
    other = signed_release(tmp_path / "other", rows=2)
    (other / "extra").write_text("")
    results = [check(folder).exit_code for folder in (small, other, small, other)]
    assert results == [0, 6, 0, 6]


def test_progress_reaches_the_end(big: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    verify_release(big, POLICY, VerifyOptions(now=NOW), lambda *call: calls.append(call))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [call[0] for call in calls] == sorted(call[0] for call in calls)


# What a publisher with a trusted key may sign, and a verifier still refuses.


def _auto_map(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": [{"auto_map": {"AutoModel": "x.Y"}}]}')


def _stale_index(folder: Path) -> None:
    write_index(folder, SHARDS[:1])
    (folder / "ledger.jsonl").unlink()


def _consolidated(folder: Path) -> None:
    shutil.copy(folder / SHARDS[0], folder / "consolidated.safetensors")


def _moved_in_index(folder: Path) -> None:
    table = json.loads((folder / INDEX_NAME).read_bytes())
    table["weight_map"][min(table["weight_map"])] = SHARDS[1]
    (folder / INDEX_NAME).write_text(json.dumps(table))


def _trailing(folder: Path) -> None:
    (folder / SHARDS[0]).write_bytes((folder / SHARDS[0]).read_bytes() + b"x")


def _short_ledger(folder: Path) -> None:
    lines = (folder / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_bytes(b"".join(lines[1:]))


SIGNED_BADLY: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "auto_map": (_auto_map, 5, "config.json"),
    "python": (lambda f: (f / "x.py").write_text(""), 5, "x.py"),
    "pickle": (lambda f: (f / "pytorch_model.bin").write_text(""), 5, "pytorch_model.bin"),
    "stale shard": (_stale_index, 6, SHARDS[1]),
    "consolidated": (_consolidated, 6, "consolidated.safetensors"),
    "index and header differ": (_moved_in_index, 6, SHARDS[0]),
    "trailing bytes": (_trailing, 8, SHARDS[0]),
    "ledger short": (_short_ledger, 6, SHARDS[0]),
    "index out": (lambda f: (f / INDEX_NAME).write_text('{"weight_map": {"a": "/x.safetensors"}}'), 8, INDEX_NAME),
    "config": (lambda f: (f / "config.json").write_text('{"a": 1, "a": 2}'), 8, "config.json"),
}


@pytest.mark.parametrize("case", SIGNED_BADLY)
def test_signed_but_not_fit_for_use(small: Path, case: str) -> None:
    spoil, code, file = SIGNED_BADLY[case]
    spoil(small)
    sign_anyway(small)
    verdict = check(small)
    assert (verdict.exit_code, file in {finding.file for finding in verdict.findings}) == (code, True), verdict.findings


def test_code_may_be_allowed(small: Path) -> None:
    _auto_map(small)
    (small / "x.py").write_text("")
    sign_anyway(small)
    assert check(small).exit_code == 5
    assert check(small, key_policy(allow_code=True)).is_ok


def test_chunk_digests_that_are_not_those_of_the_manifest(small: Path) -> None:
    def other_root(manifest):  # type: ignore[no-untyped-def]
        first, *rest = manifest.files
        return replace(manifest, files=(replace(first, chunk_root="0" * 64), *rest))

    sign_anyway(small, bend_manifest=other_root)
    assert check(small).exit_code == 8


def test_manifest_and_statement_must_list_the_same(small: Path) -> None:
    sign_anyway(small, bend_manifest=lambda manifest: replace(manifest, files=manifest.files[1:]))
    verdict = check(small)
    assert (verdict.exit_code, verdict.findings[0].file) == (8, "memopt.manifest.json")


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_release_that_model_signing_signed(big: Path, tmp_path: Path, jobs: int) -> None:
    folder = tmp_path / "release"
    unsigned = shutil.ignore_patterns("memopt.*", "SHA256SUMS", "model.sig", "tp2")
    shutil.copytree(big, folder, ignore=unsigned)
    (tmp_path / "key.pem").write_bytes(KEY.to_pem(None))
    command = [sys.executable, "-m", "model_signing", "sign", "key", "--private_key", str(tmp_path / "key.pem")]
    subprocess.run([*command, "--signature", "model.sig", "."], cwd=folder, check=True, capture_output=True)
    verdict = check(folder, jobs=jobs)
    assert (verdict.is_ok, verdict.identity, verdict.counter) == (True, None, None), verdict.findings
    assert verdict.num_verified_files == verdict.num_files
    quick = check(folder, quick=True)
    assert (quick.is_ok, quick.is_partial) == (True, True)
    assert check(folder, key_policy(min_counters={IDENTITY: 1})).exit_code == 5
    flip_byte(folder / SHARDS[0], -1)
    assert set(found(check(folder))) == {(4, SHARDS[0])}
    flip_byte(folder / SHARDS[0], -1)
    flip_byte(folder / SHARDS[1], 0)
    assert set(found(check(folder))) == {(4, SHARDS[1])}


@pytest.mark.parametrize("allowed", ["extras", "extras/deep", "extras/deep/x.json"])
def test_a_link_in_place_of_a_signed_folder_is_no_allowed_extra(small: Path, tmp_path: Path, allowed: str) -> None:
    (small / "extras" / "deep").mkdir(parents=True)
    (small / "extras" / "deep" / "x.json").write_text('{"good": 1}')
    sign_anyway(small)
    evil = tmp_path / "evil" / "deep"
    evil.mkdir(parents=True)
    (evil / "x.json").write_text('{"evil": 1}')
    policy = key_policy(allowed_extra_paths=(allowed,))
    assert check(small, policy).is_ok
    for place, target in ((small / "extras", evil.parent), (small / "extras" / "deep", evil)):
        shutil.copytree(small, tmp_path / "before")
        shutil.rmtree(place)
        place.symlink_to(target)
        verdict = check(small, policy)
        assert (verdict.is_ok, verdict.exit_code) == (False, 6)
        shutil.rmtree(small)
        shutil.move(tmp_path / "before", small)
