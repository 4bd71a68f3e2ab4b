"""The ledger's outputs, line by line: every stored tensor, and how the rank layout cuts it.

docs/formats.md, "Rank layout", has the fields. What a line says must be possible: slices add up to the whole tensor,
there is a digest for every rank, and what is not cut has the digest of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from memopt.errors import LedgerError
from memopt.manifests.digest import are_hex_digests, is_hex_digest
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.rank_folders import RankLayout, parse_layout
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.strict_json import parse_json_object

_FIELDS = ("name", "file", "dtype", "shape", "data_offsets", "sha256")
_FIELD_SET = frozenset(_FIELDS)
# The axis that a cut divides.
CUT_AXES = {"rows": 0, "columns": 1}
REPLICATED = "replicated"
EXPERT = "expert"
# weight_shape: every rank stores the shape of its own slice.
SLICE_SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class RankSlices:
    """What the ranks store of one output. `tensor`: its name, type, shape and place, the same on every rank.

    `owner`: the one rank that has it (None: all). `sha256`: hex, one a rank, or one for all.
    """

    layout: RankLayout
    cut: str
    owner: int | None
    tensor: TensorHeader
    sha256: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerOutput:
    """One stored tensor as the ledger has it. `sha256`: hex, of the bytes of the whole tensor.

    `file` is None in a release of rank files only; `tensor` then has no place (offsets 0). `ranks` is None without a
    rank layout.
    """

    file: str | None
    tensor: TensorHeader
    sha256: str
    ranks: RankSlices | None = None

    @property
    def layout(self) -> RankLayout | None:
        return None if self.ranks is None else self.ranks.layout


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One line: the logical tensor, as whoever wrote the line has it (any JSON value), and what is stored of it."""

    tensor: object
    outputs: tuple[LedgerOutput, ...]


def ledger_lines(lines: Iterable[bytes]) -> Iterator[LedgerLine]:
    """Every line of a ledger.

    Raises LedgerError for a line that breaks the format, and if outputs differ in having a hub file or a rank layout:
    no rank's set could be complete then.
    """
    first: LedgerOutput | None = None
    for number, line in enumerate(lines, start=1):
        row = parse_json_object(line, f"{LEDGER_NAME}:{number}", LedgerError)
        entries = row.get("outputs")
        if not isinstance(entries, list):
            raise LedgerError("has no list of outputs", file=f"{LEDGER_NAME}:{number}")
        outputs = tuple(_parse_output(entry, number) for entry in entries)
        for output in outputs:
            first = first or output
            if (output.file is None, output.layout) != (first.file is None, first.layout):
                name = f"{output.tensor.name[:200]!a}"
                raise _refuse(f"{name} is in {_layouts(output)}, outputs before in {_layouts(first)}", number)
        yield LedgerLine(row.get("tensor"), outputs)


def ledger_outputs(lines: Iterable[bytes]) -> Iterator[LedgerOutput]:
    """Every stored tensor of a ledger; raises as `ledger_lines`."""
    for line in ledger_lines(lines):
        yield from line.outputs


def _layouts(output: LedgerOutput) -> str:
    hub = [] if output.file is None else ["a hub file"]
    return " and ".join([*hub, *([] if output.layout is None else [output.layout.folder])])


def _refuse(message: str, number: int) -> LedgerError:
    return LedgerError(message, file=f"{LEDGER_NAME}:{number}", remedy="compress again")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for size in value:  # noqa: SIM110 (a full model's ledger has a million lists, and all() takes twice the time)
        if type(size) is not int or not 0 <= size < 2**63:
            return False
    return True


def _are_offsets(value: Any) -> bool:
    return _are_sizes(value) and len(value) == 2


def _parse_output(output: Any, number: int) -> LedgerOutput:
    is_sound = (
        isinstance(output, dict)
        and output.keys() >= _FIELD_SET
        and isinstance(output["name"], str)
        and isinstance(output["dtype"], str)
        and _are_sizes(output["shape"])
        and is_hex_digest(output["sha256"])
    )
    if is_sound and output["file"] is None:
        is_sound = output["data_offsets"] is None and output.get("ranks") is not None
    elif is_sound:
        is_sound = isinstance(output["file"], str) and _are_offsets(output["data_offsets"])
    if not is_sound:
        raise _refuse(f"an output must have {', '.join(_FIELDS)}", number)
    if output["file"] is not None and "/" in output["file"]:
        raise _refuse(f"file {output['file'][:200]!a} is not at the top of the release", number)
    start, end = output["data_offsets"] or (0, 0)
    whole = TensorHeader(output["name"], output["dtype"], tuple(output["shape"]), start, end)
    ranks = output.get("ranks")
    slices = None if ranks is None else _parse_ranks(ranks, whole, output["sha256"], number)
    return LedgerOutput(output["file"], whole, output["sha256"], slices)


def _parse_ranks(ranks: Any, whole: TensorHeader, sha256: str, number: int) -> RankSlices:
    def refuse(fault: str) -> LedgerError:
        return _refuse(f"ranks of {whole.name[:200]!a}: {fault}", number)

    if not isinstance(ranks, dict):
        raise refuse("must be a table")
    folder = ranks.get("folder")
    layout = parse_layout(folder) if isinstance(folder, str) else None
    if layout is None:
        raise refuse('folder must be as "tp8" or "ep8"')
    cut = ranks.get("cut")
    if cut not in (*CUT_AXES, REPLICATED, EXPERT, SLICE_SHAPE):
        raise refuse(f"there is no cut {cut!r:.80}")
    shape: Any = ranks.get("shape", list(whole.shape) if cut == EXPERT else None)
    if not _are_sizes(shape) or not _are_offsets(ranks.get("data_offsets")):
        raise refuse("shape and data_offsets must be lists of sizes")
    if ranks.get("dtype", whole.dtype) != whole.dtype:
        raise refuse("a slice is of another type than the whole")
    owner = ranks.get("owner")
    if (owner is None) != (cut != EXPERT) or (cut == EXPERT and layout.kind != "ep"):
        raise refuse("an expert, and nothing else, has an owner, in an expert-parallel layout")
    if owner is not None and not (_is_size(owner) and owner < layout.num_ranks):
        raise refuse(f"owner {owner!r:.80} is none of {layout.num_ranks} ranks")
    expected = _whole_shape(cut, tuple(shape), layout.num_ranks)
    if expected != whole.shape:
        text = "cannot be cut so" if expected is None else f"add up to {list(expected)!r:.80}"
        raise refuse(
            f"{cut} of {shape!r:.80} on {layout.num_ranks} ranks {text}, the tensor is {list(whole.shape)!r:.80}"
        )
    digests = ranks.get("sha256")
    wanted = 1 if cut in {REPLICATED, EXPERT} else layout.num_ranks
    if not isinstance(digests, list) or len(digests) != wanted or not are_hex_digests(digests):
        raise refuse(f"sha256 must be {wanted} digest{'s' * (wanted > 1)}")
    if (cut in {REPLICATED, EXPERT} or layout.num_ranks == 1) and digests != [sha256]:
        raise refuse("the digest of what is not cut must be that of the whole")
    start, end = ranks["data_offsets"]
    tensor = TensorHeader(whole.name, whole.dtype, tuple(shape), start, end)
    return RankSlices(layout, cut, owner, tensor, tuple(digests))


def _whole_shape(cut: str, shape: tuple[int, ...], num_ranks: int) -> tuple[int, ...] | None:
    """The shape of all slices put together; None if slices of that shape have no such axis."""
    if cut not in CUT_AXES:
        return shape
    axis = CUT_AXES[cut]
    if axis >= len(shape):
        return None
    return (*shape[:axis], shape[axis] * num_ranks, *shape[axis + 1 :])
