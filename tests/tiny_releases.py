"""Small signed releases: hub shards of several chunks, index, ledger, small files and, if asked for, rank folders."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from signing_keys import fixed_key

from memopt.manifests.bundle import PAYLOAD_TYPE, pae, render_bundle
from memopt.manifests.chunk_file import render_chunks
from memopt.manifests.digest import CHUNK_SIZE_BYTES, FileDigest
from memopt.manifests.file_names import CHUNKS_NAME, MANIFEST_NAME, SIGNATURE_NAME, SUMS_NAME, is_signature_name
from memopt.manifests.keys import PrivateKey
from memopt.manifests.manifest import Manifest, parse_manifest, render_manifest
from memopt.manifests.policy import TrustPolicy, policy_for_key
from memopt.manifests.safetensors_header import read_header
from memopt.manifests.safetensors_index import INDEX_NAME, render_index
from memopt.manifests.sign import SignOptions, digest_of, render_sums, sign_release
from memopt.manifests.signer import KeySigner
from memopt.manifests.statement import Resource, render_statement

IDENTITY = "acme/tiny-int4"
CREATED = 1_700_000_000
NOW = CREATED + 1000
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
KEY = fixed_key(1)
POLICY = policy_for_key(KEY.public_key)
# Two shards of nine MiB: three chunks each, the last one short.
THREE_CHUNKS = 18 * 2**10
# A few hundred bytes of weights, for tests that change every byte.
FEW_BYTES = 1


def shard_tensors(number: int, rows: int) -> dict[str, torch.Tensor]:
    """The tensors of a shard, all element sizes among them; shards differ in every tensor but not in size."""
    generator = torch.Generator().manual_seed(number)
    prefix = f"model.layers.{number}"
    values = torch.randn(rows, 128, generator=generator)
    return {
        f"{prefix}.attention.weight": values.to(torch.bfloat16),
        f"{prefix}.experts.weight_packed": torch.randint(-(2**31), 2**31 - 1, (rows, 32), generator=generator).int(),
        f"{prefix}.experts.weight_scale": values[:, :64].contiguous().to(torch.bfloat16),
        f"{prefix}.experts.weight_shape": torch.tensor([rows, 256 + number]),
        f"{prefix}.norm.weight": values[0, :7].clone(),
        f"{prefix}.router.bias": values[0, 7].clone(),
        f"{prefix}.fp8": values[:1, :5].to(torch.float8_e4m3fn),
        f"{prefix}.empty": torch.empty(0, 4),
    }


def _ledger(folder: Path, names: Sequence[str]) -> bytes:
    lines = []
    for name in names:
        raw = (folder / name).read_bytes()
        header = read_header(folder / name)
        for tensor in header.tensors:
            data = raw[header.data_start + tensor.start : header.data_start + tensor.end]
            output = {
                "name": tensor.name,
                "file": name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [tensor.start, tensor.end],
                "sha256": hashlib.sha256(data).hexdigest(),
            }
            lines.append(json.dumps({"tensor": tensor.name, "fate": "copied", "sources": [], "outputs": [output]}))
    return "".join(line + "\n" for line in lines).encode()


def write_index(folder: Path, names: Sequence[str]) -> None:
    """The index of the weight files `names` of `folder`."""
    headers = {name: read_header(folder / name) for name in names}
    weight_map = {tensor.name: name for name, header in headers.items() for tensor in header.tensors}
    size = sum(header.file_size_bytes - header.data_start for header in headers.values())
    (folder / INDEX_NAME).write_bytes(render_index(weight_map, size))


def write_ledger(folder: Path) -> None:
    """ledger.jsonl of the shards at the top of `folder`, and a release.json that names it."""
    ledger = _ledger(folder, sorted(path.name for path in folder.glob("*.safetensors")))
    (folder / "ledger.jsonl").write_bytes(ledger)
    release = {
        "identity": {"name": IDENTITY, "family": "glm_moe_dsa"},
        "source": {"kind": "folder"},
        "recipe": {"name": "tiny"},
        "tool": {"memopt": "0.1.0"},
        "ledger": {"file": "ledger.jsonl", "sha256": hashlib.sha256(ledger).hexdigest()},
    }
    (folder / "release.json").write_text(json.dumps(release, indent=2))


def write_release(folder: Path, *, rows: int = FEW_BYTES, num_ranks: int = 0) -> dict[str, torch.Tensor]:
    """An unsigned release in the new `folder`; gives its hub tensors. `num_ranks`: that many tp folders, too."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", "hidden_size": 128}))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    tensors: dict[str, torch.Tensor] = {}
    for number, name in enumerate(SHARDS):
        shard = shard_tensors(number, rows)
        save_file(shard, folder / name, {"format": "pt"})
        tensors |= shard
    write_index(folder, SHARDS)
    write_ledger(folder)
    for rank in range(num_ranks):
        part = folder / f"tp{num_ranks}" / f"rank-{rank}"
        part.mkdir(parents=True)
        for number, name in enumerate(SHARDS):
            save_file(rank_tensors(number, rows, rank, num_ranks), part / name, {"format": "pt"})
        write_index(part, SHARDS)
    return tensors


def rank_tensors(number: int, rows: int, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """The slice of a shard that a rank holds: its rows of every matrix."""
    return {
        name: tensor.chunk(num_ranks)[rank].clone() if tensor.dim() == 2 and tensor.shape[0] >= num_ranks else tensor
        for name, tensor in shard_tensors(number, rows).items()
    }


def sign(folder: Path, *keys: PrivateKey, **options: int | str | None) -> Path:
    """Sign `folder` as `memopt sign` does."""
    signers = [KeySigner(key) for key in keys or (KEY,)]
    chosen: dict[str, int | str | None] = {"identity": IDENTITY, "counter": 7, "created": CREATED}
    sign_release(folder, signers, SignOptions(**(chosen | options)))  # type: ignore[arg-type]
    return folder


def signed_release(folder: Path, *, rows: int = FEW_BYTES, num_ranks: int = 0) -> Path:
    """Write and sign a release."""
    write_release(folder, rows=rows, num_ranks=num_ranks)
    return sign(folder)


def _files(folder: Path) -> dict[str, Path]:
    made = {MANIFEST_NAME, CHUNKS_NAME, SUMS_NAME}
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: path for name, path in paths.items() if name not in made and not is_signature_name(name)}


def sign_anyway(
    folder: Path,
    *keys: PrivateKey,
    bend_manifest: Callable[[Manifest], Manifest | bytes] | None = None,
    bend_payload: Callable[[bytes], bytes] | None = None,
    bend_bundle: Callable[[bytes], bytes] | None = None,
    known: Mapping[str, FileDigest] | None = None,
) -> Path:
    """Sign whatever lies in a signed `folder`, as a careless or hostile publisher with a trusted key can.

    Roles and ranks stay as they were signed; each part may be bent before the next is made from it. `known`: digests of
    files that are too large to be hashed in a test.
    """
    known = known or {}
    old = parse_manifest((folder / MANIFEST_NAME).read_bytes())
    digests = {name: known.get(name) or digest_of(path.read_bytes()) for name, path in _files(folder).items()}
    chunks = render_chunks((name, digest.leaves) for name, digest in digests.items())
    digests[CHUNKS_NAME] = digest_of(chunks)
    template = old.files[0]
    entries = [
        replace(
            old.file(name) or replace(template, role="other", ranks=None),
            path=name,
            size_bytes=digest.size_bytes,
            sha256=digest.sha256,
            chunk_root=digest.chunk_root,
        )
        for name, digest in digests.items()
    ]
    manifest: Manifest | bytes = replace(old, files=tuple(entries))
    if bend_manifest is not None:
        manifest = bend_manifest(manifest)  # type: ignore[arg-type]
    raw = manifest if isinstance(manifest, bytes) else render_manifest(manifest)
    sums = {name: digest.sha256 for name, digest in digests.items()} | {MANIFEST_NAME: hashlib.sha256(raw).hexdigest()}
    written = {CHUNKS_NAME: chunks, MANIFEST_NAME: raw, SUMS_NAME: render_sums(sums)}
    for name, data in written.items():
        (folder / name).write_bytes(data)
    sha256 = sums | {SUMS_NAME: hashlib.sha256(written[SUMS_NAME]).hexdigest()}
    payload = render_statement(IDENTITY, [Resource(name, digest) for name, digest in sha256.items()])
    if bend_payload is not None:
        payload = bend_payload(payload)
    write_signatures(folder, payload, *keys, bend=bend_bundle)
    return folder


def write_signatures(
    folder: Path, payload: bytes, *keys: PrivateKey, bend: Callable[[bytes], bytes] | None = None
) -> None:
    """Replace the signatures by those of `keys` over `payload`."""
    for path in folder.iterdir():
        if is_signature_name(path.name):
            path.unlink()
    for number, key in enumerate(keys or (KEY,)):
        name = SIGNATURE_NAME if number == 0 else f"model.{key.public_key.hint[:8]}.sig"
        raw = render_bundle(payload, key.sign(pae(PAYLOAD_TYPE, payload)), key.public_key)
        (folder / name).write_bytes(raw if bend is None else bend(raw))


def add_zeros(folder: Path, name: str, size_bytes: int) -> Path:
    """Add a file of zeros to a signed `folder` and sign it; it takes no space on disk and is not read for that.

    Its whole-file digest is made up: memopt checks chunks where there are any. `size_bytes`: whole chunks.
    """
    (folder / name).touch()
    os.truncate(folder / name, size_bytes)
    leaf = hashlib.sha256(bytes(CHUNK_SIZE_BYTES)).digest()
    digest = FileDigest(size_bytes, "ab" * 32, leaf * (size_bytes // CHUNK_SIZE_BYTES))
    return sign_anyway(folder, known={name: digest})


def flip_byte(path: Path, offset: int, mask: int = 1) -> None:
    """Change a byte in place; size, and with them all that `stat` shows but the times, stay as they are."""
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ mask]))


def key_policy(**changes: object) -> TrustPolicy:
    """The policy that trusts KEY, changed."""
    return replace(POLICY, **changes)  # type: ignore[arg-type]


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether names, types, shapes and all bits are equal."""
    if one.keys() != other.keys():
        return False
    for name, tensor in one.items():
        twin = other[name]
        if tensor.dtype != twin.dtype or tensor.shape != twin.shape:
            return False
        if tensor.numel() and not torch.equal(_bytes(tensor), _bytes(twin)):
            return False
    return True


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
