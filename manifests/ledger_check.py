"""Whether the ledger's outputs are the tensors that the weight files hold: name, type, shape and place of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memopt.errors import LayoutError, LedgerError, MemoptError
from memopt.manifests.digest import is_hex_digest
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.signed_files import FileSource
from memopt.manifests.strict_json import parse_json_object
from memopt.manifests.weights_check import SetPrint, tensor_text

_FIELDS = ("name", "file", "dtype", "shape", "data_offsets", "sha256")


@dataclass(frozen=True)
class LedgerOutput:
    """One stored tensor as the ledger has it. `sha256`: hex, of its bytes."""

    file: str
    tensor: TensorHeader
    sha256: str


def ledger_outputs(lines: Iterator[bytes]) -> Iterator[LedgerOutput]:
    """Every stored tensor of a ledger, line by line; LedgerError for a line that breaks the format."""
    for number, line in enumerate(lines, start=1):
        row = parse_json_object(line, f"{LEDGER_NAME}:{number}", LedgerError)
        outputs = row.get("outputs")
        if not isinstance(outputs, list):
            raise LedgerError("has no list of outputs", file=f"{LEDGER_NAME}:{number}")
        for output in outputs:
            yield _parse_output(output, number)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _parse_output(output: Any, number: int) -> LedgerOutput:
    is_sound = (
        isinstance(output, dict)
        and all(field in output for field in _FIELDS)
        and all(isinstance(output[field], str) for field in ("name", "file", "dtype"))
        and all(isinstance(output[field], list) for field in ("shape", "data_offsets"))
        and all(_is_size(size) for size in (*output["shape"], *output["data_offsets"]))
        and len(output["data_offsets"]) == 2
        and is_hex_digest(output["sha256"])
    )
    if not is_sound:
        raise LedgerError(
            f"an output must have {', '.join(_FIELDS)}", file=f"{LEDGER_NAME}:{number}", remedy="compress again"
        )
    start, end = output["data_offsets"]
    header = TensorHeader(output["name"], output["dtype"], tuple(output["shape"]), start, end)
    return LedgerOutput(output["file"], header, output["sha256"])


def check_ledger(
    source: FileSource, tensors: Mapping[str, SetPrint], weight_files: Collection[str]
) -> list[MemoptError]:
    """Compare ledger.jsonl with the headers that were read.

    `tensors`: file -> fingerprint of its tensors, of readable files. `weight_files`: all listed ones; those at the
    top must be in the ledger, those of a rank layout are only if it names them.
    """
    ledger: dict[str, SetPrint] = {}
    problems: list[MemoptError] = []
    try:
        for output in ledger_outputs(source.lines(LEDGER_NAME)):
            ledger.setdefault(output.file, SetPrint()).add(tensor_text(output.tensor))
    except MemoptError as problem:
        return [problem]
    for name in sorted(ledger.keys() - set(weight_files)):
        problems.append(LayoutError(f"names {name[:200]!a}, which is not listed", file=LEDGER_NAME))
    for name in sorted(weight_files):
        if name not in ledger and "/" not in name:
            problems.append(LayoutError(f"is not in {LEDGER_NAME}", file=name, remedy="compress again, then sign"))
        elif name in ledger and name in tensors and ledger[name] != tensors[name]:
            problems.append(_difference(name, source))
    return problems


def _difference(name: str, source: FileSource) -> MemoptError:
    """Which tensor differs; ledger and header are read anew, so that a sound release pays nothing."""
    try:
        held = {tensor_text(tensor): tensor.name for tensor in source.header(name).tensors}
        rows = (output.tensor for output in ledger_outputs(source.lines(LEDGER_NAME)) if output.file == name)
        named = {tensor_text(tensor): tensor.name for tensor in rows}
    except MemoptError as problem:
        return problem
    odd = held.keys() ^ named.keys()
    text = min(odd, default="")
    tensor = held.get(text) or named.get(text) or "a tensor, twice,"
    return LayoutError(
        f"{tensor[:200]!a} differs between file and {LEDGER_NAME} ({len(odd):,} differences)",
        file=name,
        remedy="compress again, then sign",
    )
