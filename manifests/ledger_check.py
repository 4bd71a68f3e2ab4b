"""Whether the ledger's outputs are the tensors that the weight files hold: name, type, shape and place of each.

Of a rank layout too: every rank must have its slice of every tensor, and nothing else. Memory stays small: tensors are
compared as fingerprints of sets, one for what all ranks have and one for what a rank alone has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial

from memopt.errors import LayoutError, MemoptError
from memopt.manifests.file_roles import LEDGER_NAME
from memopt.manifests.ledger_output import LedgerOutput, ledger_outputs
from memopt.manifests.rank_folders import RankFolder, RankLayout, rank_folder_of
from memopt.manifests.safetensors_header import TensorHeader
from memopt.manifests.signed_files import FileSource
from memopt.manifests.weights_check import SetPrint, tensor_text

# To name the tensor that differs the ledger is read again: for so many files only.
_MAX_NAMED = 4
_REMEDY = "compress again, then sign"


@dataclass
class _LedgerPrints:
    """What the ledger says of files, as fingerprints. A file is None where the ledger names no hub files.

    `read_files`, `read_ranks`: the files and ranks of which headers were read; of others a fingerprint may be empty.
    `shared`: what every rank has in its file of that name. `owned`: rank -> what it alone has there.
    """

    read_files: Collection[str]
    read_ranks: frozenset[int]
    hub: dict[str, SetPrint] = field(default_factory=dict)
    layout: RankLayout | None = None
    shared: dict[str | None, SetPrint] = field(default_factory=dict)
    owned: dict[int, dict[str | None, SetPrint]] = field(default_factory=dict)

    def add(self, output: LedgerOutput) -> None:
        if output.file is not None:
            hub = self.hub.setdefault(output.file, SetPrint())
            if output.file in self.read_files:
                hub.add(tensor_text(output.tensor))
        if output.ranks is None:
            return
        self.layout = output.ranks.layout
        owner = output.ranks.owner
        by_file = self.shared if owner is None else self.owned.setdefault(owner, {})
        ranks = by_file.setdefault(output.file, SetPrint())
        if self.read_ranks if owner is None else owner in self.read_ranks:
            ranks.add(tensor_text(output.ranks.tensor))

    def of_rank(self, rank: int) -> dict[str | None, SetPrint]:
        """What `rank` has, by file."""
        prints = dict(self.shared)
        for file, owned in self.owned.get(rank, {}).items():
            prints[file] = prints.get(file, SetPrint()) + owned
        return prints


def check_ledger(
    source: FileSource, tensors: Mapping[str, SetPrint], weight_files: Collection[str]
) -> list[MemoptError]:
    """Compare ledger.jsonl with the headers that were read.

    `tensors`: file -> fingerprint of its tensors, of readable files. `weight_files`: all listed ones; those at the
    top and those of the ledger's rank layout must be in the ledger, those of other folders are only if it names them.
    Gives LedgerError for a malformed ledger, else a LayoutError for every file and every rank that differs.
    """
    places = (rank_folder_of(name) for name in tensors)
    ledger = _LedgerPrints(tensors, frozenset(place.rank for place in places if place is not None))
    try:
        for output in ledger_outputs(source.lines(LEDGER_NAME)):
            ledger.add(output)
    except MemoptError as problem:
        return [problem]
    comparison = _Comparison(source, tensors, frozenset(weight_files))
    comparison.check_hub(ledger.hub)
    if ledger.layout is not None:
        for rank in range(ledger.layout.num_ranks):
            comparison.check_rank(RankFolder(ledger.layout, rank), ledger.of_rank(rank))
        comparison.check_strays(ledger.layout)
    return comparison.problems


class _Comparison:
    """The listed files beside the ledger's, and what differs."""

    def __init__(self, source: FileSource, tensors: Mapping[str, SetPrint], weight_files: frozenset[str]) -> None:
        self._source = source
        self._tensors = tensors
        self._listed = weight_files
        self._by_folder: dict[str, list[str]] = {}
        for name in sorted(weight_files):
            self._by_folder.setdefault(name[: name.rfind("/") + 1], []).append(name)
        self._num_named = 0
        self.problems: list[MemoptError] = []

    def check_hub(self, hub: Mapping[str, SetPrint]) -> None:
        """The files at the top."""
        for name in sorted(hub.keys() - self._listed):
            self.problems.append(LayoutError(f"names {name[:200]!a}, which is not listed", file=LEDGER_NAME))
        for name in sorted(self._listed):
            if name in hub:
                self._compare(name, hub[name], [name], partial(_hub_tensor, file=name))
            elif "/" not in name:
                self._not_in_ledger(name)

    def check_rank(self, folder: RankFolder, prints: Mapping[str | None, SetPrint]) -> None:
        """All files of one rank: its set must be complete."""
        listed = self._by_folder.get(folder.path, [])
        if None in prints:
            if listed:
                self._compare(folder.path, prints[None], listed, partial(_rank_tensor, rank=folder.rank))
            else:
                self._incomplete(folder, "has no file of weights")
            return
        expected = {f"{folder.path}{file}": found for file, found in prints.items()}
        absent = sorted(expected.keys() - set(listed))
        if absent:
            more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
            self._incomplete(folder, f"lacks {absent[0][:200]!a}{more}")
        for name in listed:
            if name in expected:
                file = name[len(folder.path) :]
                self._compare(name, expected[name], [name], partial(_rank_tensor, rank=folder.rank, file=file))
            else:
                self._not_in_ledger(name)

    def check_strays(self, layout: RankLayout) -> None:
        """Files in the layout's folder that no rank of it has."""
        for name in sorted(self._listed):
            place = rank_folder_of(name)
            is_seen = place is not None and place.rank < layout.num_ranks and name.rfind("/") == len(place.path) - 1
            if name.startswith(f"{layout.folder}/") and not is_seen:
                self._not_in_ledger(name)

    def _not_in_ledger(self, name: str) -> None:
        self.problems.append(LayoutError(f"is not in {LEDGER_NAME}", file=name, remedy=_REMEDY))

    def _incomplete(self, folder: RankFolder, fault: str) -> None:
        text = f"rank {folder.rank} of {folder.layout.folder} is not complete: it {fault}, which {LEDGER_NAME} has"
        remedy = "add what is missing; `memopt merge` and `memopt shard` make releases of other layouts"
        self.problems.append(LayoutError(text, file=folder.path, remedy=remedy))

    def _compare(
        self, place: str, named: SetPrint, files: list[str], tensor_of: Callable[[LedgerOutput], TensorHeader | None]
    ) -> None:
        """Compare what the ledger gives `place`, a file or a folder, with its `files`, if all of them were read."""
        if not all(file in self._tensors for file in files):
            return
        held = SetPrint()
        for file in files:
            held += self._tensors[file]
        if held == named:
            return
        if self._num_named == _MAX_NAMED:
            self.problems.append(LayoutError(f"differs from {LEDGER_NAME}", file=place, remedy=_REMEDY))
            return
        self._num_named += 1
        self.problems.append(self._difference(place, files, tensor_of))

    def _difference(
        self, place: str, files: list[str], tensor_of: Callable[[LedgerOutput], TensorHeader | None]
    ) -> MemoptError:
        """Which tensor differs; ledger and headers are read anew, so that a sound release pays nothing."""
        try:
            held = {tensor_text(tensor): tensor.name for file in files for tensor in self._source.header(file).tensors}
            named = {tensor_text(tensor): tensor.name for tensor in self._ledger_tensors(tensor_of)}
        except MemoptError as problem:
            return problem
        odd = held.keys() ^ named.keys()
        tensor, fault = _first_difference(held, named, odd)
        return LayoutError(f"{tensor[:200]!a} {fault} ({len(odd):,} differences)", file=place, remedy=_REMEDY)

    def _ledger_tensors(self, tensor_of: Callable[[LedgerOutput], TensorHeader | None]) -> Iterator[TensorHeader]:
        for output in ledger_outputs(self._source.lines(LEDGER_NAME)):
            tensor = tensor_of(output)
            if tensor is not None:
                yield tensor


def _first_difference(held: Mapping[str, str], named: Mapping[str, str], odd: Set[str]) -> tuple[str, str]:
    """The tensor that tells most, and what is wrong with it: one that is missing shifts all that come after it."""
    on_one_side = set(held.values()) ^ set(named.values())
    if on_one_side:
        tensor = min(on_one_side)
        is_held = tensor in held.values()
        return tensor, f"is in the file, not in {LEDGER_NAME}" if is_held else f"is in {LEDGER_NAME}, not in the file"
    text = min(odd, default="")
    tensor = held.get(text) or named.get(text) or "a tensor, twice,"
    return tensor, f"differs between file and {LEDGER_NAME}"


def _hub_tensor(output: LedgerOutput, file: str) -> TensorHeader | None:
    return output.tensor if output.file == file else None


def _rank_tensor(output: LedgerOutput, rank: int, file: str | None = None) -> TensorHeader | None:
    """What `rank` has of an output, in its file of that name."""
    if output.ranks is None or output.ranks.owner not in {None, rank} or output.file != file:
        return None
    return output.ranks.tensor
