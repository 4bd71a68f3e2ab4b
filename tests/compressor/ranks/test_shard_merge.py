"""Compressing with ranks, sharding and merging give the same bytes, whatever the way; and ranks hold true slices."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faults.trees import ledger_rows, tree
from rank_releases import MAX_FILE_BYTES, compress_in
from refusals import refusal
from release_files import contents
from safetensors.torch import load_file
from signing_keys import fixed_key
from tiny_checkpoints import TINY_GLM5, make_checkpoint

import memopt
from memopt.compressor.compress_job import planned_sizes
from memopt.compressor.release_file import parse_table, render_table
from memopt.errors import AlignmentError, ContentError, LayoutError, LedgerError, MissingFileError, UsageError
from memopt.manifests.policy import policy_for_key
from memopt.manifests.signer import KeySigner

# Checkpoint, recipe (None: the family's), degree.
CASES: list[tuple[str, str | None, dict[str, int]]] = [
    ("glm-5.2-fp8", None, {"tensor_parallel": 2}),
    ("glm-5.2-fp8", None, {"tensor_parallel": 8}),
    ("glm-5.2-fp8", None, {"expert_parallel": 4}),
    ("glm-5.2-fp8", "copy", {"tensor_parallel": 1}),
    ("glm-4.7-fp8", None, {"tensor_parallel": 4}),
    ("glm-4.7-fp8", "copy", {"tensor_parallel": 8}),
    ("kimi-k2-instruct-fp8", None, {"expert_parallel": 2}),
    ("kimi-k2.6-int4", None, {"tensor_parallel": 2}),
    ("deepseek-v3-fp8", "dequantize", {"tensor_parallel": 4}),
]


def case_name(case: Any) -> str:
    return "-".join(map(str, case.items() if isinstance(case, dict) else [case]))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(case_name, case)))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder with `source` and three releases of it: `hub`, `both`, `tp`; and the degree."""
    name, recipe, degree = request.param
    folder = tmp_path_factory.mktemp("made")
    make_checkpoint(folder / "source", name)
    ranks = dict(degree)
    compress_in(folder / "source", folder / "hub", recipe=recipe, layout="hub", **ranks)
    compress_in(folder / "source", folder / "both", recipe=recipe, layout="both", workers=1, **ranks)
    compress_in(folder / "source", folder / "tp", recipe=recipe, layout="tp", **ranks)
    return folder, degree


Made = tuple[Path, dict[str, int]]


def test_sharding_gives_what_compressing_at_once_gives(made: Made, tmp_path: Path) -> None:
    folder, degree = made
    for layout in ("both", "tp"):
        result = memopt.shard(folder / "hub", tmp_path / layout, layout=layout, **degree)  # type: ignore[arg-type]
        assert tree(tmp_path / layout) == tree(folder / layout)
        assert (result.was_complete, result.source_root_digest) == (False, None)
        assert memopt.shard(folder / "hub", tmp_path / layout, layout=layout, **degree).was_complete  # type: ignore[arg-type]
    # A release with ranks is cut anew for others.
    assert memopt.shard(folder / "both", tmp_path / "again", **degree).layouts == memopt.shard(
        folder / "hub", tmp_path / "again", **degree
    ).layouts  # fmt: skip


def test_merging_gives_the_hub_release(made: Made, tmp_path: Path) -> None:
    folder, _ = made
    for layout in ("both", "tp"):
        memopt.merge(folder / layout, tmp_path / layout)
        assert tree(tmp_path / layout) == tree(folder / "hub")
        assert memopt.merge(folder / layout, tmp_path / layout).was_complete


def test_every_size_was_planned(made: Made) -> None:
    folder, degree = made
    table = json.loads((folder / "both" / "release.json").read_bytes())
    recipe = memopt.Recipe.model_validate(table["recipe"])
    for layout in ("hub", "both", "tp"):
        options = memopt.PlanOptions(max_file_bytes=MAX_FILE_BYTES, layout=layout, **degree)  # type: ignore[arg-type]
        sizes = planned_sizes(memopt.plan(folder / "source", recipe, options=options))
        assert sizes == {name: len(raw) for name, raw in contents(folder / layout).items()}


def rank_tensors(folder: Path) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    for rank_folder in sorted(folder.glob("?p*/rank-*")):
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(rank_folder.glob("*.safetensors")):
            tensors |= load_file(path)
        index = json.loads((rank_folder / "model.safetensors.index.json").read_bytes())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
        yield int(rank_folder.name.removeprefix("rank-")), tensors


def test_the_ranks_hold_the_slices_that_the_ledger_tells_of(made: Made) -> None:
    folder, degree = made
    (num_ranks,) = degree.values()
    hub: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "hub").glob("*.safetensors")):
        hub |= load_file(path)
    ranks = dict(rank_tensors(folder / "tp"))
    assert sorted(ranks) == list(range(num_ranks))
    for row in ledger_rows(folder / "tp"):
        for output in row["outputs"]:
            name, entry = output["name"], output["ranks"]
            held = [tensors[name] for _, tensors in sorted(ranks.items()) if name in tensors]
            assert (output["file"], output["data_offsets"]) == (None, None)
            assert {tuple(tensor.shape) for tensor in held} == {tuple(entry["shape"])}
            if entry["cut"] in {"rows", "columns"}:
                # By float views of eight bits: torch compares NaN scales with nothing.
                whole = torch.cat(
                    [t.view(torch.uint8) if t.dim() else t for t in held], 0 if entry["cut"] == "rows" else 1
                )
                assert torch.equal(whole, hub[name].view(torch.uint8))
            elif entry["cut"] == "shape":
                (weight,) = (out["ranks"]["shape"] for out in row["outputs"] if out["name"].endswith("_packed"))
                assert {tuple(tensor.tolist()) for tensor in held} == {(weight[0], weight[1] * 8)}
            else:
                assert len(held) == (1 if entry["cut"] == "expert" else num_ranks)
                assert all(
                    torch.equal(tensor.reshape(-1).view(torch.uint8), hub[name].reshape(-1).view(torch.uint8))
                    for tensor in held
                )
    cuts = {output["ranks"]["cut"] for row in ledger_rows(folder / "tp") for output in row["outputs"]}
    assert {"rows", "columns", "replicated"} <= cuts
    assert ("expert" in cuts) == ("expert_parallel" in degree)


def test_layouts_change_neither_identity_nor_what_the_hub_files_hold(made: Made) -> None:
    folder, degree = made
    ((kind, num_ranks),) = degree.items()
    tables = {name: json.loads((folder / name / "release.json").read_bytes()) for name in ("hub", "both", "tp")}
    assert len({table["identity"]["plan_fingerprint"] for table in tables.values()}) == 1
    ranks = f"{kind[0]}p{num_ranks}"
    assert {name: table["layouts"] for name, table in tables.items()} == {
        "hub": ["hub"], "both": ["hub", ranks], "tp": [ranks],
    }  # fmt: skip
    hub, both = contents(folder / "hub"), contents(folder / "both")
    assert {name for name in hub if both[name] != hub[name]} == {"ledger.jsonl", "release.json"}
    for line, row in zip(ledger_rows(folder / "both"), ledger_rows(folder / "hub"), strict=True):
        for output in line["outputs"]:
            del output["ranks"]
        assert line == row


@pytest.mark.parametrize("degree", [{"tensor_parallel": 2}, {"tensor_parallel": 4}, {"tensor_parallel": 8}])
def test_the_trained_example_verifies_and_loads_rank_by_rank(degree: dict[str, int], tmp_path: Path) -> None:
    key = fixed_key()
    compress_in(TINY_GLM5, tmp_path / "hub", max_file_bytes=4_000_000, layout="hub", **degree)
    memopt.shard(tmp_path / "hub", tmp_path / "out", **degree)
    memopt.sign_release(tmp_path / "out", [KeySigner(key)])
    policy = policy_for_key(key.public_key)
    verdict = memopt.verify_release(tmp_path / "out", policy)
    assert verdict.is_ok, verdict.findings
    (num_ranks,) = degree.values()
    with memopt.open_release(tmp_path / "out", policy=policy) as release:
        assert release.ranks == tuple(range(num_ranks))
        whole = release.load()
        ranks = [release.load(rank=rank) for rank in range(num_ranks)]
    assert all(tensors.keys() == whole.keys() for tensors in ranks)
    name = "model.layers.1.mlp.experts.0.down_proj.weight_packed"
    assert torch.equal(torch.cat([tensors[name] for tensors in ranks], 1), whole[name])
    planned = memopt.plan(TINY_GLM5, options=memopt.PlanOptions(max_file_bytes=4_000_000, **degree))  # type: ignore[arg-type]
    for rank, tensors in enumerate(ranks):
        written = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert written == sum(f.data_size_bytes for unit in planned.units for f in unit.rank_files if f.rank == rank)


def test_experts_in_int4_beside_kept_fp8_blocks(tmp_path: Path) -> None:
    """Block scales under compressed-tensors' name, cut in whole blocks."""
    source = make_checkpoint(tmp_path / "source", "glm-5.2-fp8", num_attention_heads=16, num_key_value_heads=16)
    for layout in ("hub", "both"):
        compress_in(source, tmp_path / layout, recipe="glm-5.2-int4-fp8", layout=layout, tensor_parallel=2)
    memopt.shard(tmp_path / "hub", tmp_path / "sharded", tensor_parallel=2)
    memopt.merge(tmp_path / "both", tmp_path / "merged")
    assert tree(tmp_path / "sharded") == tree(tmp_path / "both")
    assert tree(tmp_path / "merged") == tree(tmp_path / "hub")
    scales = {
        (row["role"], output["ranks"]["cut"], tuple(output["shape"]), tuple(output["ranks"]["shape"]))
        for row in ledger_rows(tmp_path / "both")
        for output in row["outputs"]
        if row["format"].startswith("fp8-block") and output["name"].endswith("_scale")
    }
    assert {("shared_expert", "rows", (2, 2), (1, 2)), ("shared_expert", "columns", (2, 2), (2, 1))} <= scales
    assert ("attention", "columns", (2, 4), (2, 2)) in scales
    # Half a block is no block.
    with refusal(AlignmentError, "self_attn.q_b_proj", "768 rows / 4 ranks = 192", "blocks of 128x128"):
        memopt.shard(tmp_path / "hub", tmp_path / "out", tensor_parallel=4)


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub release of a GLM-5.1 checkpoint; read only."""
    folder = tmp_path_factory.mktemp("release")
    compress_in(make_checkpoint(folder / "source", "glm-5.1-fp8"), folder / "hub", layout="hub", tensor_parallel=2)
    return folder / "hub"


def test_a_release_that_verifies_first(release: Path, tmp_path: Path) -> None:
    key, other = fixed_key(1), fixed_key(2)
    signed = tmp_path / "signed"
    memopt.merge(memopt.shard(release, tmp_path / "both", tensor_parallel=2).out, signed)
    digest = memopt.sign_release(signed, [KeySigner(key)]).root_digest
    result = memopt.shard(signed, tmp_path / "out", tensor_parallel=2, policy=policy_for_key(key.public_key))
    assert result.source_root_digest == digest
    assert tree(tmp_path / "out") == tree(tmp_path / "both")
    with pytest.raises(memopt.MemoptError) as caught:
        memopt.shard(signed, tmp_path / "other", tensor_parallel=2, policy=policy_for_key(other.public_key))
    assert int(caught.value.exit_code) == 3
    (signed / "ledger.jsonl").write_bytes((signed / "ledger.jsonl").read_bytes().replace(b"F32", b"I32", 1))
    with pytest.raises(memopt.MemoptError) as caught:
        memopt.shard(signed, tmp_path / "other", tensor_parallel=2, policy=policy_for_key(key.public_key))
    assert int(caught.value.exit_code) == 4
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_cut_is_refused_before_anything_is_written(release: Path, tmp_path: Path) -> None:
    with refusal(AlignmentError, "self_attn.q_b_proj.weight", "16 ranks", "heads of 48", "tensor-parallel 1, 2, 4, 8"):
        memopt.shard(release, tmp_path / "out", tensor_parallel=16)
    with refusal(AlignmentError, "embed_tokens", "3 ranks"):
        memopt.shard(release, tmp_path / "out", expert_parallel=3)
    with refusal(UsageError, "nothing to shard for"):
        memopt.shard(release, tmp_path / "out", layout="hub")
    assert not (tmp_path / "out").exists()


def test_what_is_no_release_is_sent_to_compress(release: Path, tmp_path: Path) -> None:
    source = release.parent / "source"
    with refusal(UsageError, "is no release of memopt", f"memopt compress {source} OUT --recipe copy --tp N"):
        memopt.shard(source, tmp_path / "out", tensor_parallel=2)
    with refusal(UsageError, "no release folder", "memopt pull"):
        memopt.shard(tmp_path / "nothing", tmp_path / "out", tensor_parallel=2)
    with refusal(UsageError, "has no rank files"):
        memopt.merge(release, tmp_path / "out")
    with refusal(UsageError, "has no name"):
        memopt.merge("", tmp_path / "out")
    ranks = memopt.shard(release, tmp_path / "tp", tensor_parallel=2, layout="tp").out
    with refusal(UsageError, "has no hub files, only tp2", f"memopt merge {ranks} OUT"):
        memopt.shard(ranks, tmp_path / "out", tensor_parallel=4)


def copied(release: Path, folder: Path) -> Path:
    """A copy of a release that a test may spoil."""
    folder.mkdir()
    for name, raw in contents(release).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    return folder


@pytest.mark.parametrize(
    ("name", "old", "new", "error", "words"),
    [
        ("release.json", b'"layouts": [', b'"layouts":  [', ContentError, ["release.json", "not as memopt writes"]),
        ("ledger.jsonl", b'"layer": 1', b'"layer": 2', ContentError, ["ledger.jsonl", "not the ledger"]),
    ],
)
def test_descriptions_that_were_changed_are_refused(
    name: str, old: bytes, new: bytes, error: type[memopt.MemoptError], words: list[str], release: Path, tmp_path: Path
) -> None:
    spoiled = copied(release, tmp_path / "spoiled")
    raw = (spoiled / name).read_bytes()
    assert old in raw
    (spoiled / name).write_bytes(raw.replace(old, new, 1))
    with refusal(error, *words):
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "layouts",
    [7, "hub", {}, [], [7], [None], [[]], ["tp0"], ["HUB"], ["hub", "hub"], ["tp2", "hub"], ["tp2", "ep2"], ["tp4097"]],
)
def test_layouts_that_no_memopt_writes_are_refused(layouts: Any, release: Path, tmp_path: Path) -> None:
    spoiled = copied(release, tmp_path / "spoiled")
    table = parse_table((spoiled / "release.json").read_bytes())
    (spoiled / "release.json").write_bytes(render_table(table | {"layouts": layouts}))
    with refusal(UsageError, "release.json", "no layouts that this memopt knows"):
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)


LIES: list[tuple[str, Any, list[str]]] = [
    ("offsets", lambda row: row["outputs"][0].update(data_offsets=[8, 16]), ["not the one that memopt writes"]),
    ("path", lambda row: row["outputs"][0].update(file="../x.safetensors"), ["not at the top"]),
    ("file", lambda row: row["outputs"][0].update(file="x\n.safetensors"), ["is no weight file"]),
    ("other layout", lambda row: row["outputs"][0].update(file=None), ["an output must have"]),
    ("type", lambda row: row["outputs"][0].update(dtype="F99"), ["there is no type 'F99'"]),
    ("shape", lambda row: row["outputs"][0].update(shape=[-1]), ["an output must have"]),
    ("size", lambda row: row["outputs"][0].update(shape=[10**300, 1]), ["an output must have"]),
    ("digest", lambda row: row["outputs"][0].update(sha256=[]), ["an output must have"]),
    ("no name", lambda row: row.update(tensor=[]), ["not the parts of one tensor"]),
    ("error", lambda row: row.update(error={"max": "x"}), ["not the one that memopt writes"]),
    ("no outputs", lambda row: row.update(outputs=[]), ["without outputs stands before"]),
    ("another tensor", lambda row: row.update(tensor="model.norm.weight"), ["not the parts of one tensor"]),
    ("no field", lambda row: row["outputs"][0].pop("sha256"), ["an output must have"]),
    ("carriage return", lambda row: b"\r" + json.dumps(row, ensure_ascii=False).encode(), ["not the one that memopt"]),
    ("spaces", lambda row: row.update(tensor=row["tensor"] + " "), ["not the parts of one tensor"]),
]


@pytest.mark.parametrize(("change", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_a_ledger_that_lies_and_is_named_by_its_release_is_refused(
    change: Any, words: list[str], release: Path, tmp_path: Path
) -> None:
    spoiled = copied(release, tmp_path / "spoiled")
    before = (spoiled / "ledger.jsonl").read_bytes()
    first, rest = before.split(b"\n", 1)
    row = json.loads(first)
    changed = change(row)
    line = changed if isinstance(changed, bytes) else json.dumps(row, ensure_ascii=False).encode()
    after = line + b"\n" + rest
    (spoiled / "ledger.jsonl").write_bytes(after)
    table = (spoiled / "release.json").read_bytes()
    digests = [hashlib.sha256(raw).hexdigest().encode() for raw in (before, after)]
    (spoiled / "release.json").write_bytes(table.replace(digests[0], digests[1]))
    with pytest.raises((LedgerError, memopt.MemoptError)) as caught:
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)
    assert caught.value.code in {"MEMOPT_LEDGER", "MEMOPT_SHAPE"}, caught.value
    assert all(word in str(caught.value) for word in words), caught.value
    assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.mark.parametrize("name", ["other.py", "stray.safetensors", "notes/x.txt", "figure.png"])
def test_a_file_that_memopt_did_not_make_is_refused(name: str, release: Path, tmp_path: Path) -> None:
    spoiled = copied(release, tmp_path / "spoiled")
    (spoiled / name).parent.mkdir(exist_ok=True)
    (spoiled / name).write_bytes(b"x")
    with refusal(LayoutError, name.partition("/")[0], "nothing of memopt made it", "move it out"):
        memopt.shard(spoiled, tmp_path / "out", tensor_parallel=2)


def test_a_missing_rank_is_named(release: Path, tmp_path: Path) -> None:
    for layout in ("both", "tp"):
        ranks = memopt.shard(release, tmp_path / layout, tensor_parallel=2, layout=layout).out  # type: ignore[arg-type]
        first = sorted((ranks / "tp2" / "rank-1").glob("*.safetensors"))[0]
        first.unlink()
        with refusal(MissingFileError, "tp2/rank-1/" + first.name, "rank 1 of tp2 is not complete"):
            memopt.merge(ranks, tmp_path / "out")
    (ranks / "tp2" / "rank-1" / "model.safetensors.index.json").unlink()
    with refusal(MissingFileError, "tp2/rank-1/model.safetensors.index.json", "rank 1 of tp2 is not complete"):
        memopt.merge(ranks, tmp_path / "out")


def test_release_json_is_read_back_as_it_was_written(release: Path) -> None:
    raw = (release / "release.json").read_bytes()
    assert parse_table(raw)["totals"] is not None
    for spoiled in (raw + b" ", raw[:-2], b"[]", b"{", b'{"a": 1.5}\n', raw.replace(b"e-0", b"E-0")):
        with refusal(ContentError, "release.json", "not as memopt writes it"):
            parse_table(spoiled)
