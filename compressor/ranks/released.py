"""A finished release, seen through its ledger: which tensors it has, in which units, in which layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor, raise_first
from memopt.compressor.checkpoint.model_config import CONFIG_NAME, parse_config
from memopt.compressor.checkpoint.source_tensor import SourceTensor, scan_source
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.ledger import ledger_line, placed_output
from memopt.compressor.ranks.cut import cut_of
from memopt.compressor.ranks.layout import HUB, TENSOR_PARALLEL, Layouts
from memopt.compressor.ranks.ledger_file import LEDGER_REMEDY, LedgerFile, LineSpan, ScannedLine, span_of
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.release_file import parse_table
from memopt.compressor.tensor_plan import Fate, OutputTensor, TensorPlan
from memopt.compressor.units import Unit, hub_layout
from memopt.errors import ContentError, IndexFileError, LedgerError, MissingFileError, UsageError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.rank_folders import MAX_RANKS, RankFolder, RankLayout, parse_layout
from memopt.manifests.release_description import RELEASE_NAME
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.safetensors_index import INDEX_NAME, WEIGHT_SUFFIX, is_plain_file_name, parse_index
from memopt.manifests.strict_json import parse_json_object

# Gives the bytes of a small file of the release, by name; those that were signed, where the release was verified.
ReadFile = Callable[[str], bytes]


class ReleasedPlan:
    """What the release in `folder` holds.

    `table`: release.json's (see parse_table). `units`: in the release's own layouts, in the ledger's order. Everything
    is read from ledger and config alone; `rows` compares the ledger's lines with what follows from them.
    `signed_names`: the files of a release that was verified, None for another; there are more if the policy allows.
    """

    def __init__(self, folder: Path, read: ReadFile, signed_names: frozenset[str] | None = None) -> None:
        """Raises UsageError if `folder` holds no release, ContentError, LedgerError, ConfigError, IndexFileError."""
        self.folder = folder
        self.read = read
        self.signed_names = signed_names
        if not (folder / RELEASE_NAME).exists():
            raise UsageError(
                f"{folder} is no release of memopt: it has no {RELEASE_NAME}",
                remedy=f"for a plain checkpoint use `memopt compress {folder} OUT --recipe copy --tp N`",
            )
        self.release_bytes = read(RELEASE_NAME)
        self.table = parse_table(self.release_bytes)
        self.layouts = _layouts_of(self.table)
        self.config_bytes = read(CONFIG_NAME)
        self._ledger = LedgerFile(folder)
        lines = list(self._ledger.scan())
        if self._ledger.sha256 != _table_entry(self.table, "ledger", "sha256"):
            raise ContentError(f"is not the ledger that {RELEASE_NAME} names", file=LEDGER_NAME, remedy=LEDGER_REMEDY)
        stored = [line for line in lines if line.outputs]
        tail = lines[len(stored) :]
        for line in tail:
            if line.outputs:
                raise self._refuse(line.outputs[0].name, "a tensor without outputs stands before one with some")
        self._tail = span_of(tail)
        plans = self._plans(stored)
        files = self._files_of(stored)
        self._spans: dict[int, LineSpan] = {}
        self.units = tuple(self._units(stored, plans, files))

    def _refuse(self, tensor: str, fault: str) -> LedgerError:
        return LedgerError(fault, tensor=tensor, file=LEDGER_NAME, remedy=LEDGER_REMEDY)

    def _plans(self, lines: list[ScannedLine]) -> list[TensorPlan]:
        """Every stored tensor as one that is copied: where it is cut is its family's rule, as when it was made."""
        config = parse_config(self.config_bytes)
        tensors = {output.name: output for line in lines for output in line.outputs}
        if len(tensors) != sum(len(line.outputs) for line in lines):
            raise LedgerError("names a tensor twice", file=LEDGER_NAME, remedy=LEDGER_REMEDY)
        checkpoint = Checkpoint(self.folder, config, {}, tensors)
        scan = scan_source(checkpoint, family_of(config), parse_text_config(config))
        raise_first(scan.problems)
        sources: dict[str, SourceTensor] = {source.spec.name: source for source in scan.tensors}
        plans: list[TensorPlan] = []
        for line in lines:
            source = sources.pop(line.tensor, None) if isinstance(line.tensor, str) else None
            if source is None or source.parts != line.outputs:
                raise self._refuse(line.outputs[0].name, "its outputs are not the parts of one tensor of the family")
            outputs = tuple(OutputTensor(part.name, part.dtype, part.shape) for part in line.outputs)
            plans.append(TensorPlan(source, Fate.COPIED, outputs))
        return plans

    def _files_of(self, lines: list[ScannedLine]) -> list[str]:
        """The file name, in whichever folder, of each line's tensor."""
        if self.layouts.writes_hub:
            return [line.outputs[0].file for line in lines]
        ranks = self.layouts.ranks or RankLayout(TENSOR_PARALLEL, 1)
        places: dict[str, str] = {}
        for rank in range(ranks.num_ranks):
            index = RankFolder(ranks, rank).path + INDEX_NAME
            try:
                places |= parse_index(self.read(index), index).weight_map
            except MissingFileError:
                raise missing_rank(ranks, rank, index) from None
        names = [places.get(line.outputs[0].name, "") for line in lines]
        if "" in names:
            tensor = lines[names.index("")].outputs[0].name
            raise IndexFileError("no rank's index names it", tensor=tensor, remedy=LEDGER_REMEDY)
        return names

    def _units(self, lines: list[ScannedLine], plans: list[TensorPlan], files: list[str]) -> Iterator[Unit]:
        seen: set[str] = set()
        first = 0
        for last in range(1, len(lines) + 1):
            if last < len(lines) and files[last] == files[first]:
                continue
            name = files[first]
            if name in seen or not (is_plain_file_name(name) and name.endswith(WEIGHT_SUFFIX)):
                fault = f"{name[:200]!a} is no weight file, or its tensors are apart"
                raise self._refuse(lines[first].outputs[0].name, fault)
            seen.add(name)
            number = len(seen)
            self._spans[number] = span_of(lines[first:last])
            tensors = tuple(plans[first:last])
            yield Unit(number, name, tensors, hub_layout(tensors), self.layouts.ranks, self.layouts.writes_hub)
            first = last

    def lines(self, unit: Unit) -> list[bytes]:
        """The ledger's lines of `unit`, read anew; SourceChangedError if they are not those that were read first."""
        return self._ledger.read(self._spans[unit.number])

    def tail_lines(self) -> list[bytes]:
        """The ledger's lines of tensors that are not stored; raises as `lines`."""
        return self._ledger.read(self._tail)

    def rows(self, unit: Unit) -> list[dict[str, Any]]:
        """The ledger's rows of `unit`; LedgerError unless they say what memopt would write for its tensors."""
        places = unit.places()
        rows: list[dict[str, Any]] = []
        for plan, line in zip(unit.tensors, self.lines(unit), strict=True):
            name = plan.source.spec.name
            row = parse_json_object(line, LEDGER_NAME, LedgerError)
            try:
                digests = digests_of(row)
                placed = [
                    placed_output(entry, plan, output, places, digests)
                    for entry, output in zip(row["outputs"], plan.outputs, strict=True)
                ]
                is_ours = placed == row["outputs"] and ledger_line(row) == line
            except (KeyError, TypeError, ValueError, AttributeError):
                is_ours = False
            if not is_ours or not _are_complete(row, plan, unit):
                raise self._refuse(name, "its line is not the one that memopt writes for it")
            rows.append(row)
        return rows


def digests_of(row: dict[str, Any]) -> UnitDigests:
    """The digests in one row of a ledger."""
    outputs = row["outputs"]
    ranks = {entry["name"]: tuple(entry["ranks"]["sha256"]) for entry in outputs if "ranks" in entry}
    return UnitDigests({entry["name"]: entry["sha256"] for entry in outputs}, ranks)


def missing_rank(ranks: RankLayout, rank: int, name: str) -> MissingFileError:
    """The refusal of a set of ranks from which a file is missing."""
    return MissingFileError(
        f"rank {rank} of {ranks.folder} is not complete: the file is missing",
        file=name,
        remedy="all ranks are needed: fetch the release again",
    )


def _are_complete(row: dict[str, Any], plan: TensorPlan, unit: Unit) -> bool:
    if unit.ranks is None:
        return True
    digests = digests_of(row).ranks
    return all(len(digests[output.name]) == cut_of(output, plan, unit.ranks).num_digests for output in plan.outputs)


def _layouts_of(table: dict[str, Any]) -> Layouts:
    names = table.get("layouts")
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        ranks = [parse_layout(name) for name in names if name != HUB]
        layouts = Layouts(ranks[0] if ranks else None, writes_hub=HUB in names)
        has_too_many = layouts.ranks is not None and layouts.ranks.num_ranks > MAX_RANKS
        if names and list(layouts.names) == names and not has_too_many:
            return layouts
    raise UsageError(
        f"{RELEASE_NAME} names no layouts that this memopt knows",
        remedy="use the memopt that made the release, or compress anew",
    )


def _table_entry(table: dict[str, Any], part: str, key: str) -> Any:
    value = table.get(part)
    return value.get(key) if isinstance(value, dict) else None


def stored_in(header: TensorHeader, file: str, data_start: int) -> StoredTensor:
    """`header`'s tensor as it lies in `file`, whose data section starts at byte `data_start`."""
    return StoredTensor(header.name, file, header.dtype, header.shape, data_start + header.start, header.size_bytes)
