"""Lines of the ledger: what they may say of ranks, and ledgers that lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refusal

from memopt.errors import LedgerError
from memopt.manifests.ledger_output import LedgerOutput, ledger_outputs

Table = dict[str, Any]
NAME = "model.layers.0.weight"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def output(cut: str = "rows", **fields: Any) -> Table:
    """A sound output on four ranks."""
    shapes = {"rows": [2, 6], "columns": [8, 6], "replicated": [8, 6], "expert": [8, 6], "shape": [2]}
    whole = {"rows": [8, 6], "columns": [8, 24], "shape": [2]}.get(cut, [8, 6])
    is_one = cut in {"replicated", "expert"}
    ranks: Table = {"folder": "ep4" if cut == "expert" else "tp4", "cut": cut, "shape": shapes[cut]}
    ranks |= {"owner": 3} if cut == "expert" else {}
    ranks |= {"data_offsets": [16, 40], "sha256": [digest("whole")] if is_one else [digest(str(n)) for n in range(4)]}
    table: Table = {
        "name": NAME,
        "file": "model.safetensors",
        "dtype": "BF16",
        "shape": whole,
        "data_offsets": [0, 96],
        "sha256": digest("whole"),
        "ranks": ranks,
    }
    return table | fields


def parse(*outputs: Table) -> list[LedgerOutput]:
    lines = [json.dumps({"tensor": NAME, "outputs": [table]}).encode() for table in outputs]
    return list(ledger_outputs(iter(lines)))


@pytest.mark.parametrize("cut", ["rows", "columns", "replicated", "expert", "shape"])
def test_every_cut(cut: str) -> None:
    table = output(cut)
    (found,) = parse(table)
    assert found.ranks is not None
    assert (found.file, found.sha256, found.tensor.shape) == (table["file"], table["sha256"], tuple(table["shape"]))
    assert (found.tensor.start, found.tensor.end) == (0, 96)
    assert found.ranks.layout.folder == table["ranks"]["folder"]
    assert found.ranks.tensor.shape == tuple(table["ranks"]["shape"])
    assert (found.ranks.tensor.start, found.ranks.tensor.end) == (16, 40)
    assert found.ranks.owner == (3 if cut == "expert" else None)
    assert found.ranks.sha256 == tuple(table["ranks"]["sha256"])


def test_without_ranks_and_without_a_hub_file() -> None:
    table = output()
    del table["ranks"]
    (found,) = parse(table)
    assert found.ranks is None
    assert found.layout is None
    (found,) = parse(output(file=None, data_offsets=None))
    assert found.file is None
    assert (found.tensor.start, found.tensor.end) == (0, 0)


def ranks(kind: str = "rows", /, **fields: Any) -> Callable[[], Table]:
    def make() -> Table:
        table = output(kind)
        table["ranks"] |= fields
        return table

    return make


def without(field: str) -> Callable[[], Table]:
    def make() -> Table:
        table = output()
        del table["ranks"][field]
        return table

    return make


HOSTILE: dict[str, tuple[Callable[[], Table], str]] = {
    "no table": (lambda: output(ranks=[1]), "must be a table"),
    "no folder": (without("folder"), "folder must be"),
    "a folder that is no layout": (ranks(folder="tp4/.."), "folder must be"),
    "a folder for no ranks": (ranks(folder="tp0"), "folder must be"),
    "a folder that is a number": (ranks(folder=4), "folder must be"),
    "no cut": (without("cut"), "no cut None"),
    "an unknown cut": (ranks(cut="diagonal"), "no cut 'diagonal'"),
    "a cut that is a list": (ranks(cut=["rows"]), "no cut ['rows']"),
    "the other cut": (ranks(cut="columns"), "add up to [2, 24], the tensor is [8, 6]"),
    "replicated, but smaller": (ranks("replicated", shape=[2, 6]), "add up to [2, 6], the tensor is [8, 6]"),
    "slices that do not add up": (ranks(shape=[3, 6]), "add up to [12, 6], the tensor is [8, 6]"),
    "slices of more dimensions": (ranks(shape=[2, 6, 1]), "add up to [8, 6, 1]"),
    "a thousand dimensions": (ranks(shape=[1] * 1000), "add up to [4, 1, 1"),
    "rows of a scalar": (ranks(shape=[]), "cannot be cut so"),
    "columns of a vector": (ranks("columns", shape=[24]), "cannot be cut so"),
    "a shape with a float": (ranks(shape=[2.0, 6]), "lists of sizes"),
    "a shape with a truth": (ranks(shape=[True, 6]), "lists of sizes"),
    "no shape": (without("shape"), "lists of sizes"),
    "a negative place": (ranks(data_offsets=[-8, 16]), "lists of sizes"),
    "half a place": (ranks(data_offsets=[8]), "lists of sizes"),
    "no place": (without("data_offsets"), "lists of sizes"),
    "another type": (ranks(dtype="F32"), "another type"),
    "an owner of rows": (ranks(owner=1), "has an owner"),
    "an expert without owner": (ranks("expert", owner=None), "has an owner"),
    "an expert in tensor-parallel ranks": (ranks("expert", folder="tp4"), "expert-parallel"),
    "an owner that is no rank": (ranks("expert", owner=4), "owner 4 is none of 4 ranks"),
    "an owner that is a truth": (ranks("expert", owner=True), "owner True"),
    "too few digests": (ranks(sha256=[digest("0")] * 3), "must be 4 digests"),
    "too many digests": (ranks(sha256=[digest("0")] * 5), "must be 4 digests"),
    "one digest for all slices": (ranks(sha256=[digest("whole")]), "must be 4 digests"),
    "a digest a rank of what is one": (ranks("replicated", sha256=[digest("whole")] * 4), "must be 1 digest"),
    "no digests": (ranks(sha256=None), "must be 4 digests"),
    "a digest that is none": (ranks(sha256=[digest("0")] * 3 + ["0" * 63]), "must be 4 digests"),
    "a false digest of what is one": (ranks("replicated", sha256=[digest("0")]), "that of the whole"),
    "a false digest of an expert": (ranks("expert", sha256=[digest("0")]), "that of the whole"),
    "a false digest of a lone rank": (ranks(folder="tp1", shape=[8, 6], sha256=[digest("0")]), "that of the whole"),
    "no hub file and no ranks": (lambda: output(file=None, data_offsets=None, ranks=None), "an output must have"),
    "no hub file, but a place": (lambda: output(file=None), "an output must have"),
    "a hub file without a place": (lambda: output(data_offsets=None), "an output must have"),
    "a file in a folder": (lambda: output(file="tp4/rank-0/model.safetensors"), "not at the top of the release"),
    "a file that is a number": (lambda: output(file=1), "an output must have"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_ledger_that_cannot_be_true(name: str) -> None:
    make, words = HOSTILE[name]
    with refusal(LedgerError, "ledger.jsonl:1", words):
        parse(make())


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (output(file=None, data_offsets=None), "is in tp4, outputs before in a hub file and tp4"),
        ({key: value for key, value in output().items() if key != "ranks"}, "is in a hub file, outputs before"),
        (ranks(folder="tp2", shape=[4, 6], sha256=[digest("0")] * 2)(), "a hub file and tp2"),
        (ranks("replicated", folder="ep4")(), "a hub file and ep4"),
    ],
)
def test_outputs_that_are_not_in_the_same_layouts(second: Table, words: str) -> None:
    with refusal(LedgerError, "ledger.jsonl:2", words):
        parse(output(), second)


@given(
    cut=st.sampled_from(["rows", "columns"]),
    shape=st.lists(st.integers(0, 2**20), min_size=2, max_size=4),
    num_ranks=st.integers(2, 64),
    data=st.data(),
)
def test_only_slices_that_add_up_are_read(cut: str, shape: list[int], num_ranks: int, data: st.DataObject) -> None:
    axis = {"rows": 0, "columns": 1}[cut]
    whole = [size * num_ranks if n == axis else size for n, size in enumerate(shape)]
    digests = [digest(str(n)) for n in range(num_ranks)]
    table = output(shape=whole)
    table["ranks"] |= {"folder": f"tp{num_ranks}", "cut": cut, "shape": shape, "sha256": digests}
    (found,) = parse(table)
    assert found.ranks is not None
    assert found.ranks.tensor.shape == tuple(shape)
    place = data.draw(st.integers(0, len(shape) - 1))
    changed = data.draw(st.integers(0, 2**20).filter(lambda size: size != shape[place]))
    table["ranks"]["shape"] = [changed if n == place else size for n, size in enumerate(shape)]
    with refusal(LedgerError, "add up to"):
        parse(table)
    table["ranks"]["shape"] = shape
    table["ranks"]["sha256"] = digests[: data.draw(st.integers(0, num_ranks - 1))]
    with refusal(LedgerError, f"must be {num_ranks} digests"):
        parse(table)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.just("rows"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from(["folder", "cut", "shape", "owner", "dtype", "data_offsets", "sha256"]), value=JSON)
def test_any_value_in_any_field_is_read_or_refused(field: str, value: Any) -> None:
    table = output()
    table["ranks"][field] = value
    fields = table["ranks"]
    try:
        (found,) = parse(table)
    except LedgerError:
        return
    assert found.ranks is not None
    assert (list(found.ranks.tensor.shape), found.ranks.cut) == (fields["shape"], fields["cut"])
    assert list(found.ranks.sha256) == fields["sha256"]
