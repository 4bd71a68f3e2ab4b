"""open_release: what it hands out is what was signed; everything else raises, before a tensor is returned."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from opened_releases import EMBED, hub_tensors, opened, whole_file_release
from refusals import refusal
from safetensors.torch import save_file
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
    same_tensors,
    sign,
    sign_anyway,
    signed_release,
    write_release,
)

from memopt.errors import (
    ContentError,
    HeaderError,
    IndexFileError,
    LayoutError,
    MissingFileError,
    MissingTensorError,
    PolicyError,
    SignatureError,
    UsageError,
)
from memopt.manifests.loader import GROUP_SIZE_BYTES
from memopt.manifests.release import open_release
from memopt.manifests.safetensors_index import INDEX_NAME
from memopt.manifests.verified_reader import BadChunkError


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release whose shards have three chunks; not to be changed."""
    return signed_release(tmp_path_factory.mktemp("big") / "release", rows=THREE_CHUNKS)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return signed_release(tmp_path / "release")


def test_load_gives_what_safetensors_gives(big: Path) -> None:
    with opened(big) as release:
        assert same_tensors(release.load(), hub_tensors(big))


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_any_number_of_threads(big: Path, jobs: int) -> None:
    with opened(big, jobs=jobs) as release:
        assert same_tensors(release.load(), hub_tensors(big))


def test_tensors_one_by_one_and_together(big: Path) -> None:
    expected = hub_tensors(big)
    with opened(big) as release:
        assert release.tensor_names == tuple(sorted(expected))
        for name in expected:
            assert same_tensors(release.tensors([name]), {name: expected[name]})
        chosen = sorted(expected)[::2]
        assert list(release.tensors(chosen)) == chosen
        assert release.tensors([]) == {}


def test_iter_tensors_goes_through_all_in_groups(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert GROUP_SIZE_BYTES == 256 * 2**20
    monkeypatch.setattr("memopt.manifests.loader.GROUP_SIZE_BYTES", 3 * 2**20)
    with opened(big) as release:
        assert same_tensors(dict(release.iter_tensors()), hub_tensors(big))


def test_tensors_are_private_and_stay(small: Path) -> None:
    with opened(small) as release:
        loaded = release.load()
    expected = {name: tensor.clone() for name, tensor in loaded.items()}
    for shard in SHARDS:
        (small / shard).write_bytes(bytes((small / shard).stat().st_size))
        os.truncate(small / shard, 3)
    gc.collect()
    assert same_tensors(loaded, expected)
    loaded[EMBED].zero_()  # writable memory of one's own


def test_reading_some_tensors_verifies_only_their_chunks(big: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(big, tmp_path / "copy")
    flip_byte(copy / SHARDS[0], -1)
    with opened(copy) as release:
        last = [name for name, tensor in release.tensors(["model.layers.0.norm.weight"]).items() if tensor.numel()]
        assert last == ["model.layers.0.norm.weight"]
        with pytest.raises(BadChunkError) as caught:
            release.load()
        assert (caught.value.chunk, caught.value.start_bytes) == (2, 2 * 4 * 2**20)


@pytest.mark.parametrize("offset", [0, 8, 4 * 2**20 - 1, 4 * 2**20, -1])
@pytest.mark.parametrize("jobs", [1, 3])
def test_one_flipped_bit(big: Path, tmp_path: Path, offset: int, jobs: int) -> None:
    copy = shutil.copytree(big, tmp_path / "copy")
    flip_byte(copy / SHARDS[1], offset, 0x80)
    with opened(copy, jobs=jobs) as release, pytest.raises(ContentError, match=rf"{SHARDS[1]}: chunk \d"):
        release.load()


def test_iteration_stops_at_the_bad_chunk(big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memopt.manifests.loader.GROUP_SIZE_BYTES", 2**20)
    copy = shutil.copytree(big, tmp_path / "copy")
    flip_byte(copy / SHARDS[1], -1)
    expected = hub_tensors(big)
    with opened(copy) as release:
        stream = release.iter_tensors()
        seen: dict[str, torch.Tensor] = {}
        with pytest.raises(BadChunkError):
            seen.update(stream)
    assert 0 < len(seen) < len(expected)
    assert same_tensors(seen, {name: expected[name] for name in seen})


def test_sizes_are_checked_before_anything_is_read(small: Path) -> None:
    os.truncate(small / SHARDS[0], (small / SHARDS[0]).stat().st_size - 1)
    with refusal(ContentError, SHARDS[0], "were signed"):
        opened(small)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "ledger.jsonl", "SHA256SUMS"])
def test_small_files_are_checked_at_once(small: Path, name: str) -> None:
    flip_byte(small / name, 3)
    with pytest.raises(ContentError, match=name):
        opened(small)


def test_read_file(small: Path) -> None:
    with opened(small) as release:
        assert release.read_file("config.json") == (small / "config.json").read_bytes()
        assert release.read_file(SHARDS[0]) == (small / SHARDS[0]).read_bytes()
        for name in ("absent", "../config.json", "model.sig", "/etc/passwd", ""):
            with refusal(LayoutError, "no such file was signed"):
                release.read_file(name)
        flip_byte(small / "config.json", 0)
        with pytest.raises(ContentError):
            release.read_file("config.json")


def test_unlisted_and_missing_files(small: Path) -> None:
    (small / "modeling_x.py").write_text("")
    with refusal(LayoutError, "modeling_x.py"):
        opened(small)
    (small / "modeling_x.py").unlink()
    (small / "tokenizer.json").rename(small / "aside")
    (small / "aside").unlink()
    with refusal(MissingFileError, "tokenizer.json"):
        opened(small)


def test_a_missing_shard_is_found_by_load(small: Path) -> None:
    (small / SHARDS[1]).unlink()
    with opened(small) as release, refusal(MissingFileError, SHARDS[1]):
        release.load()


def test_strict_refuses_what_else_is_a_warning(small: Path, tmp_path: Path) -> None:
    os.link(small / "config.json", tmp_path / "twin")
    opened(small).close()
    with refusal(LayoutError, "config.json", "hard links"):
        opened(small, strict=True)
    (tmp_path / "twin").unlink()
    (small / "empty").mkdir()
    opened(small).close()
    with refusal(LayoutError, "empty folder"):
        opened(small, strict=True)


def test_trust(small: Path, tmp_path: Path) -> None:
    with refusal(SignatureError, "0 distinct trusted keys signed"):
        opened(small, policy=None, key=fixed_key(2).public_key)
    with refusal(PolicyError, "counter 7 is below the floor 8"):
        opened(small, policy=key_policy(min_counters={IDENTITY: 8}))
    pem = tmp_path / "key.pub"
    pem.write_bytes(KEY.public_key.pem)
    for key in (KEY.public_key, KEY.public_key.pem, pem, str(pem)):
        opened(small, policy=None, key=key).close()
    policy = tmp_path / "trust.json"
    policy.write_text(json.dumps({"schema": "memopt.trust/1", "keys": [{"pem": KEY.public_key.pem.decode()}]}))
    for path in (policy, str(policy)):
        opened(small, policy=path).close()


def test_wrong_calls(small: Path, tmp_path: Path) -> None:
    with refusal(UsageError, "either a policy or a key"):
        open_release(small)
    with refusal(UsageError, "either a policy or a key"):
        open_release(small, policy=POLICY, key=KEY.public_key)
    with refusal(UsageError, "0 jobs"):
        opened(small, jobs=0)
    with refusal(UsageError, "no folder"):
        opened(tmp_path / "absent")
    with opened(small) as release:
        with refusal(MissingTensorError, "model.absent"):
            release.tensors(["model.absent"])
        with refusal(UsageError, "no files of rank 0", "hub layout only"):
            release.load(rank=0)


def test_closed(small: Path) -> None:
    release = opened(small)
    stream = release.iter_tensors()
    release.close()
    release.close()
    read_file = partial(release.read_file, "config.json")
    for call in (release.load, partial(release.tensors, []), read_file, partial(next, stream)):
        with refusal(UsageError, "closed"):
            call()


def test_no_descriptor_is_left_open(small: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with opened(small) as release:
        release.load()
        list(release.iter_tensors())
        release.tensors(release.tensor_names)
    (small / "extra").touch()
    with pytest.raises(LayoutError):
        opened(small)
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_device(big: Path, tmp_path: Path) -> None:
    """ "meta" stands for an accelerator: shapes only, but read and verified all the same."""
    expected = hub_tensors(big)
    with opened(big) as release:
        loaded = release.load(device="meta")
        assert {name: (t.shape, t.dtype) for name, t in loaded.items()} == {
            name: (t.shape, t.dtype) for name, t in expected.items()
        }
        assert all(tensor.is_meta for tensor in release.tensors(expected, device="meta").values())
    copy = shutil.copytree(big, tmp_path / "copy")
    flip_byte(copy / SHARDS[1], -1)
    with opened(copy) as release, pytest.raises(BadChunkError):
        release.load(device="meta")


def test_a_release_without_a_manifest(tmp_path: Path) -> None:
    folder = whole_file_release(tmp_path / "release")
    expected = hub_tensors(folder)
    with opened(folder) as release:
        assert release.manifest is None
        assert same_tensors(release.load(), expected)
        assert same_tensors(dict(release.iter_tensors()), expected)
        assert same_tensors(release.tensors([EMBED]), {EMBED: expected[EMBED]})
        flip_byte(folder / SHARDS[0], -1)
        for call in (release.load, lambda: release.tensors([EMBED]), lambda: next(release.iter_tensors())):
            with pytest.raises(ContentError, match=SHARDS[0]):
                call()
        os.truncate(folder / SHARDS[0], 1000)
        with pytest.raises(ContentError, match=SHARDS[0]):
            release.load()


def test_a_single_file_without_an_index(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    write_release(folder)
    tensors = {"a": torch.arange(7, dtype=torch.int16), "b": torch.ones(3, dtype=torch.float64)}
    for name in (*SHARDS, INDEX_NAME, "ledger.jsonl", "release.json"):
        (folder / name).unlink()
    save_file(tensors, folder / "model.safetensors")
    sign(folder)
    with opened(folder) as release:
        assert release.tensor_names == ("a", "b")
        assert same_tensors(release.load(), tensors)


def test_data_at_odd_offsets(tmp_path: Path) -> None:
    """Foreign files need not align their data; the format allows it."""
    folder = tmp_path / "release"
    write_release(folder)
    for name in (*SHARDS, INDEX_NAME, "ledger.jsonl", "release.json"):
        (folder / name).unlink()
    table = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]},
    }
    raw = json.dumps(table).encode()
    raw += b" " * (1 - len(raw) % 2)
    b = torch.tensor([1.5, -2.25], dtype=torch.float64)
    data = bytes([1, 2, 3]) + bytes(b.view(torch.uint8).tolist())
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    sign(folder)
    with opened(folder) as release:
        assert torch.equal(release.load()["b"], b)
        assert torch.equal(release.tensors(["b"])["b"], b)


def test_a_wrong_index_is_refused_before_a_shard_is_opened(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.loads((small / INDEX_NAME).read_text())
    index["weight_map"]["model.extra"] = "model-00003-of-00003.safetensors"
    (small / INDEX_NAME).write_text(json.dumps(index))
    sign_anyway(small)
    with opened(small) as release:
        monkeypatch.setattr("memopt.manifests.loader.Loader.load_files", lambda *_: pytest.fail("a shard was opened"))
        with refusal(LayoutError, "model-00003-of-00003.safetensors"):
            release.load()


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors"])
def test_an_index_that_leads_out(small: Path, shard: str) -> None:
    index = json.loads((small / INDEX_NAME).read_text())
    index["weight_map"][EMBED] = shard
    (small / INDEX_NAME).write_text(json.dumps(index))
    sign_anyway(small)
    with opened(small) as release, pytest.raises(IndexFileError, match="of this folder"):
        release.load()


def test_a_signed_file_with_a_hostile_header(small: Path) -> None:
    path = small / SHARDS[0]
    path.write_bytes(path.read_bytes() + b"\0")
    sign_anyway(small)
    with opened(small) as release:
        for call in (release.load, lambda: release.tensors([EMBED]), lambda: list(release.iter_tensors())):
            with pytest.raises(HeaderError, match=SHARDS[0]):
                call()


def test_a_tensor_that_the_ledger_does_not_have(small: Path) -> None:
    lines = (small / "ledger.jsonl").read_text().splitlines(keepends=True)
    (small / "ledger.jsonl").write_text("".join(lines[1:]))
    sign_anyway(small)
    with opened(small) as release:
        for call in (release.load, lambda: release.tensors([EMBED]), lambda: list(release.iter_tensors())):
            with pytest.raises(LayoutError, match=r"ledger\.jsonl"):
                call()


def test_opening_needs_neither_torch_nor_numpy(small: Path, tmp_path: Path) -> None:
    pem = tmp_path / "key.pub"
    pem.write_bytes(KEY.public_key.pem)
    code = (
        "import sys; from memopt.manifests.release import open_release;"
        f"open_release({str(small)!r}, key={str(pem)!r}, now={NOW}).read_file('config.json');"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
