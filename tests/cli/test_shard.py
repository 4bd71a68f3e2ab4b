"""`memopt shard` and `memopt merge`: what they say, on a terminal and to a machine, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.small_source import MAX_FILE_BYTES, make_small_source
from faults.trees import tree
from signing_keys import fixed_key

import memopt
from cli.invoke import invoke, run_command
from memopt.manifests.signer import KeySigner

RANK_FLAGS = ("--max-file-size", str(MAX_FILE_BYTES), "--tp", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small `source`, its release for two ranks `both`, and its signed hub release `hub` with `key.pem`."""
    folder = tmp_path_factory.mktemp("shard")
    source = make_small_source(folder / "source")
    assert invoke("compress", source, folder / "both", *RANK_FLAGS, "--workers", "2").code == 0
    assert invoke("merge", folder / "both", folder / "hub").code == 0
    memopt.sign_release(folder / "hub", [KeySigner(fixed_key())])
    (folder / "key.pem").write_bytes(fixed_key().public_key.pem)
    (folder / "other.pem").write_bytes(fixed_key(2).public_key.pem)
    return folder


def test_compress_says_which_files_it_wrote(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lines = invoke("compress", folder / "source", out, *RANK_FLAGS, "--workers", "2").stdout.splitlines()
    assert lines[0] == f"made        {out}: 10 weight files and 20 rank files"
    assert lines[2].startswith("written     ")
    assert lines[2].endswith(": hub and tp2 files")
    assert tree(out) == tree(folder / "both")
    verdict = invoke("compress", folder / "source", out, *RANK_FLAGS, "--json").verdict
    assert (verdict["layouts"], verdict["num_rank_files"], verdict["was_complete"]) == (["hub", "tp2"], 20, True)
    data = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    assert 0 < data - verdict["written_size_bytes"] < 30 * 10_000


def test_shard_says_what_it_made_and_that_nobody_vouched(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = run_command("shard", folder / "hub", out, "--tp", "2", "--workers", "2")
    assert made.code == 0
    lines = made.stdout.splitlines()
    assert lines[0] == f"made        {out}: 10 weight files and 20 rank files"
    assert lines[-1] == f"next        memopt sign {out} --key release.pem"
    assert f"note: the signature of {folder / 'hub'} was not checked" in made.stderr
    assert tree(out) == tree(folder / "both")
    assert invoke("shard", folder / "hub", out, "--tp", "2").stdout.startswith(f"{out} is complete already")
    ranks = tmp_path / "ranks"
    assert invoke("shard", folder / "hub", ranks, "--ep", "2", "--layout", "tp").stdout.startswith(
        f"made        {ranks}: 20 rank files\n"
    )
    assert invoke("merge", ranks, tmp_path / "merged").stdout.startswith(
        f"made        {tmp_path / 'merged'}: 10 weight files\n"
    )


def test_a_verified_release_has_its_digest_in_the_verdict(folder: Path, tmp_path: Path) -> None:
    digest = memopt.open_release(folder / "hub", key=folder / "key.pem").root_digest
    made = invoke("shard", folder / "hub", tmp_path / "out", "--tp", "2", "--verify-key", folder / "key.pem", "--json")
    verdict = made.verdict
    assert (verdict["command"], verdict["status"], verdict["source_root_digest"]) == ("shard", "ok", digest)
    assert "note:" not in made.stderr
    assert not (tmp_path / "out" / "model.sig").exists()
    again = invoke("merge", folder / "both", tmp_path / "merged", "--json").verdict
    assert (again["command"], again["source_root_digest"], again["layouts"]) == ("merge", None, ["hub"])


def test_what_stays_behind_is_said(folder: Path, tmp_path: Path) -> None:
    (folder / "both" / "README.md").write_text("x")
    (folder / "both" / "quality.json").write_text("{}")
    lines = invoke("merge", folder / "both", tmp_path / "out").stdout.splitlines()
    assert "not copied  README.md, quality.json: about the release that was read alone" in lines
    verdict = invoke("merge", folder / "both", tmp_path / "out", "--json").verdict
    assert (verdict["left_behind"], verdict["was_complete"]) == (["README.md", "quality.json"], True)
    for name in ("README.md", "quality.json"):
        (folder / "both" / name).unlink()
    assert "not copied" not in invoke("merge", folder / "both", tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("shard", "hub", "out"), 2, ["for how many ranks", "--tp N or --ep N"]),
        (("shard", "hub", "out", "--tp", "2", "--ep", "4"), 2, ["other ranks than the rest"]),
        (("shard", "hub", "out", "--tp", "3"), 2, ["MEMOPT_ALIGNMENT", "3 ranks"]),
        (("shard", "hub", "out", "--tp", "0"), 2, ["MEMOPT_USAGE"]),
        (("shard", "hub", "hub", "--tp", "2"), 2, ["MEMOPT_OUTPUT"]),
        (("shard", "source", "out", "--tp", "2"), 2, ["is no release of memopt", "--recipe copy --tp N"]),
        (("shard", "hub", "out", "--tp", "2", "--verify-key", "other.pem"), 3, ["MEMOPT_SIGNATURE"]),
        (("shard", "hub", "out", "--tp", "2", "--verify-key", "key.pem", "--policy", "x"), 2, ["exclude each other"]),
        (("merge", "hub", "out"), 2, ["has no rank files"]),
        (("merge", "absent", "out"), 2, ["no release folder"]),
        (("compress", "source", "out", "--layout", "tp"), 2, ["how many ranks"]),
        (("plan", "source", "--tp", "4", "--ep", "2"), 2, ["other ranks than the rest"]),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], code: int, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    refused = invoke(*arguments)
    assert refused.code == code
    assert all(word in refused.refusal for word in words), refused.refusal
    assert not (folder / "out").exists()


def test_plan_lists_the_rank_files(folder: Path) -> None:
    verdict = invoke("plan", folder / "source", *RANK_FLAGS, "--json").verdict
    names = {file["name"]: file["size_bytes"] for file in verdict["files"]}
    assert names == {
        str(path.relative_to(folder / "both")): path.stat().st_size
        for path in (folder / "both").rglob("*")
        if path.is_file()
    }
    assert verdict["layouts"] == ["hub", "tp2"]
    hub = invoke("plan", folder / "source", *RANK_FLAGS, "--layout", "hub", "--json").verdict
    assert hub["layouts"] == ["hub"]
    assert not any("/" in file["name"] for file in hub["files"])
