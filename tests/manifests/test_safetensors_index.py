"""model.safetensors.index.json: file names that stay in the folder, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from memopt.errors import IndexFileError, MissingFileError
from memopt.manifests.safetensors_index import (
    INDEX_NAME,
    MAX_INDEX_SIZE_BYTES,
    is_plain_file_name,
    parse_index,
    read_index,
    render_index,
)

TENSOR = "model.layers.0.mlp.gate.weight"
SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "shard",
    [
        "../secrets.safetensors",
        "../../etc/model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "./model.safetensors",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "C:model.safetensors",
        "\\\\host\\share\\model.safetensors",
        "model\x00.safetensors",
        "model\n.safetensors",
        "",
        ".",
        "..",
        "model.bin",
        "model.safetensors/",
        "model.safetensors.index.json",
        7,
        None,
        True,
        ["model.safetensors"],
        {"file": "model.safetensors"},
    ],
)
def test_a_shard_outside_the_folder_is_refused(shard: Any) -> None:
    raw = json.dumps({"weight_map": {"a.weight": SHARD, TENSOR: shard}}).encode()
    with refusal(IndexFileError, INDEX_NAME, TENSOR, repr(shard)):
        parse_index(raw)


@pytest.mark.parametrize("weight_map", [{}, [], None, "x", 3])
def test_a_weight_map_must_name_something(weight_map: Any) -> None:
    with refusal(IndexFileError, INDEX_NAME, "weight_map"):
        parse_index(json.dumps({"metadata": {}, "weight_map": weight_map}).encode())


def test_no_weight_map_a_list_and_a_name_given_twice_are_refused() -> None:
    with refusal(IndexFileError, INDEX_NAME, "weight_map"):
        parse_index(b'{"metadata": {"total_size": 4}}')
    with refusal(IndexFileError, INDEX_NAME, "list"):
        parse_index(b"[]")
    with refusal(IndexFileError, INDEX_NAME, f"'{TENSOR}' appears twice"):
        parse_index(f'{{"weight_map": {{"{TENSOR}": "{SHARD}", "{TENSOR}": "{SHARD}"}}}}'.encode())


def test_golden_index() -> None:
    raw = render_index({"b.weight": "model-00002-of-00002.safetensors", "a.weight": SHARD}, 1234)
    assert raw.decode() == (
        '{\n  "metadata": {\n    "total_size": 1234\n  },\n  "weight_map": {\n'
        f'    "a.weight": "{SHARD}",\n    "b.weight": "model-00002-of-00002.safetensors"\n  }}\n}}\n'
    )


FILES = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\:"), min_size=1, max_size=12)


@given(
    weight_map=st.dictionaries(st.text(max_size=12), FILES.map(lambda n: f"{n}.safetensors"), min_size=1, max_size=5)
)
@settings(max_examples=100, deadline=None)
def test_what_is_rendered_parses(weight_map: dict[str, str]) -> None:
    index = parse_index(render_index(weight_map, 8))
    assert index.weight_map == weight_map
    assert index.file_names == tuple(sorted(set(weight_map.values())))


@given(name=st.text(max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_plain_name_joins_to_a_direct_child(name: str) -> None:
    if is_plain_file_name(name):
        joined = Path("/folder") / name
        assert joined.parent == Path("/folder")
        assert joined.name == name


def test_an_index_over_the_cap_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / INDEX_NAME).open("wb") as stream:
        stream.truncate(MAX_INDEX_SIZE_BYTES + 1)
    with refusal(IndexFileError, INDEX_NAME, "268,435,457", "268,435,456"):
        read_index(tmp_path)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with refusal(MissingFileError, INDEX_NAME, str(tmp_path)):
        read_index(tmp_path)
