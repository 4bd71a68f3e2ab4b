"""Every parser that reads bytes from outside: given anything, it returns or raises a MemoptError, quickly."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from evaluate_scores import made_quality

from memopt.cli.output import one_line
from memopt.compressor.calibration_figures import CalibrationFigures
from memopt.compressor.evaluate.calibration_data import read_token_data
from memopt.compressor.evaluate.ledger_figures import ledger_figures
from memopt.compressor.evaluate.quality_file import parse_quality, render_quality
from memopt.compressor.evaluate.report_html import render_report
from memopt.compressor.evaluate.task_scores import TaskScore
from memopt.compressor.evaluate.token_windows import document_windows
from memopt.errors import MemoptError
from memopt.manifests.bundle import parse_bundle, render_bundle
from memopt.manifests.chunk_file import parse_chunks
from memopt.manifests.digest import chunk_root
from memopt.manifests.keys import generate_private_key
from memopt.manifests.ledger_output import ledger_outputs
from memopt.manifests.manifest import Manifest, ManifestFile, parse_manifest, render_manifest
from memopt.manifests.policy import parse_policy
from memopt.manifests.safetensors_header import (
    LENGTH_SIZE_BYTES,
    TensorHeader,
    header_length,
    parse_header,
    render_header,
)
from memopt.manifests.safetensors_index import parse_index, render_index
from memopt.manifests.signer import KeySigner
from memopt.manifests.statement import Resource, parse_statement, render_statement

_SIZES = (0, 1, 4 * 2**20, 4 * 2**20 + 1)
_LEAVES = b"".join(bytes([n]) * 32 for n in range(1, 5))


def _manifest() -> Manifest:
    files = []
    position = 0
    for number, size in enumerate(_SIZES):
        end = position + 32 * -(-size // (4 * 2**20))
        root = chunk_root(size, _LEAVES[position:end])
        role, ranks = ("weights", (0, 3)) if number == 3 else ("other", None)
        files.append(ManifestFile(f"part/file-{number}", size, "ab" * 32, role, ranks, root))
        position = end
    return Manifest(
        identity="acme/tiny",
        family="glm4_moe",
        counter=7,
        created=1_700_000_000,
        not_after=None,
        previous_digest=None,
        source_digest="cd" * 32,
        recipe_digest="ef" * 32,
        tools={"memopt": "0.1.0"},
        files=tuple(files),
    )


MANIFEST = _manifest()
_QUALITY = render_quality(made_quality(tasks=(TaskScore("gsm8k", "exact_match,none", 200, 71.5, 3.2, 70.9, 3.2),)))


def _bundle(raw: bytes) -> None:
    bundle = parse_bundle(raw, "model.sig")
    parse_statement(bundle.payload)


def _statement(raw: bytes) -> None:
    statement = parse_statement(raw)
    again = parse_statement(render_statement(statement.subject_name, statement.resources))
    if set(again.resources) != set(statement.resources):
        raise AssertionError("a statement changes when it is written and read again")


def _manifest_file(raw: bytes) -> None:
    manifest = parse_manifest(raw)
    again = parse_manifest(render_manifest(manifest))
    if again != replace(manifest, files=tuple(sorted(manifest.files, key=lambda file: file.path))):
        raise AssertionError("a manifest changes when it is written and read again")


def _chunks(raw: bytes) -> None:
    if parse_chunks(raw, MANIFEST).raw != _LEAVES:
        raise AssertionError("digests were accepted that are not under the chunk roots")


def _header(raw: bytes) -> None:
    length = header_length(raw[:LENGTH_SIZE_BYTES], len(raw), "a.safetensors")
    header = parse_header(raw[LENGTH_SIZE_BYTES : LENGTH_SIZE_BYTES + length], len(raw), "a.safetensors")
    if sum(tensor.size_bytes for tensor in header.tensors) != len(raw) - header.data_start:
        raise AssertionError("a header does not account for every byte")


def _index(raw: bytes) -> None:
    for name in parse_index(raw).file_names:
        if "/" in name or name in {"", ".", ".."}:
            raise AssertionError(f"the index leads out of its folder: {name!r}")


def _policy(raw: bytes) -> None:
    parse_policy(raw)


def _ledger(raw: bytes) -> None:
    for output in ledger_outputs(iter(raw.split(b"\n"))):
        ranks = output.ranks
        if ranks is not None and ranks.owner is None and len(ranks.sha256) not in {1, ranks.layout.num_ranks}:
            raise AssertionError("a rank has no digest")
        if (
            ranks is not None
            and math.prod(output.tensor.shape) > math.prod(ranks.tensor.shape) * ranks.layout.num_ranks
        ):
            raise AssertionError("the ranks do not hold the whole tensor")


def _quality(raw: bytes) -> None:
    if render_quality(parse_quality(raw)) != raw:
        raise AssertionError("quality.json was accepted in another spelling")


def _ledger_figures(raw: bytes) -> None:
    figures = ledger_figures(iter(raw.split(b"\n")))
    render_report(parse_quality(_QUALITY), figures)


def _token_data(suffix: str) -> Callable[[bytes], None]:
    def read(raw: bytes) -> None:
        with tempfile.NamedTemporaryFile(suffix=suffix) as file:
            Path(file.name).write_bytes(raw)
            data = read_token_data(Path(file.name), 256, lambda text: list(text.encode()))
        if data.digest.num_tokens != sum(len(document) for document in data.documents):
            raise AssertionError("tokens are lost")
        if any(len(window.ids) < 2 for window in document_windows(data, 8)):
            raise AssertionError("a window predicts nothing")

    return read


def _calibrated_line() -> bytes:
    figures = CalibrationFigures(9, 0, "gptq", 0.01, 4.0, 2.0, 1.0, 8, 0, "").ledger_figures()
    row = {"tensor": "model.layers.3.mlp.experts.0.up_proj.weight", "role": "routed_expert", "layer": 3}
    return json.dumps(row | {"error": {"relative_mse": 0.01, **figures}}).encode()


def _id_file() -> bytes:
    header = render_header([TensorHeader("ids", "I32", (2, 3), 0, 24)], {})
    return header + b"".join(number.to_bytes(4, "little") for number in (1, 2, 3, 250, 5, 6))


def _ledger_line(cut: str, folder: str, shape: list[int], digests: list[str], **more: int) -> bytes:
    ranks = {"folder": folder, "cut": cut, "shape": shape, "data_offsets": [0, 16], "sha256": digests} | more
    place = {"file": "m.safetensors", "dtype": "I32", "shape": [4, 2], "data_offsets": [8, 40], "sha256": "ab" * 32}
    return json.dumps({"tensor": "t", "outputs": [{"name": "t"} | place | {"ranks": ranks}]}).encode()


@dataclass(frozen=True)
class Parser:
    """`read` is given any bytes; `seeds` are sound examples to start from."""

    read: Callable[[bytes], None]
    seeds: tuple[bytes, ...]


def _seeds() -> dict[str, Parser]:
    signer = KeySigner(generate_private_key("p256"))
    statement = render_statement("tiny", [Resource("a/b.bin", "ab" * 32), Resource("config.json", "cd" * 32)])
    tensors = [TensorHeader("a", "BF16", (2, 2), 0, 8), TensorHeader("b", "U8", (3,), 8, 11)]
    header = render_header(tensors, {"format": "pt"}) + bytes(11)
    policy = {"schema": "memopt.trust/1", "keys": [{"pem": signer.public_key.pem.decode(), "identities": ["a/b"]}]}
    limits = {"threshold": 1, "min_counters": {"acme/tiny": 3}, "max_age_seconds": 86400, "revoked_keys": []}
    chain = {"certificates": [{"rawBytes": "AAAA"}]}
    bundle = render_bundle(statement, b"0\x06\x02\x01\x01\x02\x01\x01", signer.public_key)
    other = json.loads(bundle)
    other["verificationMaterial"] = {"x509CertificateChain": chain}
    return {
        "bundle": Parser(_bundle, (bundle, json.dumps(other).encode())),
        "statement": Parser(_statement, (statement,)),
        "manifest": Parser(_manifest_file, (render_manifest(MANIFEST),)),
        "chunks": Parser(_chunks, (_LEAVES,)),
        "header": Parser(_header, (header,)),
        "index": Parser(_index, (render_index({"a": "m-1.safetensors", "b": "m-2.safetensors"}, 11),)),
        "ledger": Parser(
            _ledger,
            (
                _ledger_line("rows", "tp2", [2, 2], ["01" * 32, "02" * 32]),
                _ledger_line("columns", "tp2", [4, 1], ["01" * 32, "02" * 32]),
                _ledger_line("replicated", "tp2", [4, 2], ["ab" * 32]),
                _ledger_line("expert", "ep2", [4, 2], ["ab" * 32], owner=1),
            ),
        ),
        "quality": Parser(_quality, (_QUALITY,)),
        "figures": Parser(_ledger_figures, (_calibrated_line(),)),
        "text": Parser(_token_data(".jsonl"), (b'{"text": "some words"}\n', b'{"text": "a \\ud83d\\ude00", "id": 3}')),
        "ids": Parser(_token_data(".safetensors"), (_id_file(),)),
        "policy": Parser(_policy, (json.dumps(policy | limits).encode(), json.dumps(policy).encode())),
    }


PARSERS = _seeds()


def try_parser(name: str, raw: bytes) -> bool:
    """Whether parser `name` accepts `raw`; anything but acceptance or a MemoptError is raised."""
    try:
        PARSERS[name].read(raw)
    except MemoptError as problem:
        line = one_line(str(problem))
        if not problem.message or not line.isprintable():
            raise AssertionError(f"not a clear line: {line!r:.300}") from problem
        return False
    return True
