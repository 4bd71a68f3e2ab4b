"""All files of a unit, written in one pass over its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from memopt.compressor.checkpoint.writer import FAULT_IN_MEMOPT, Bytes, UnitFile
from memopt.compressor.ranks.cut import Cut, CutKind, cut_of
from memopt.compressor.ranks.fan_out import FanOut
from memopt.compressor.ranks.unit_digests import UnitDigests
from memopt.compressor.tensor_plan import OutputTensor
from memopt.compressor.units import PlannedFile, Unit
from memopt.errors import SizeMismatchError

_SAME_AS_WHOLE = {CutKind.REPLICATED, CutKind.EXPERT}


class _WholeHash:
    """Stands in for a hub file that is not written: its tensors are hashed all the same."""

    def __init__(self, file: PlannedFile) -> None:
        self._name = file.name
        self._states = {tensor.name: hashlib.sha256() for tensor in file.layout}
        self._remaining = {tensor.name: tensor.size_bytes for tensor in file.layout}

    def append(self, name: str, chunk: Bytes) -> None:
        view = memoryview(chunk).cast("B")
        self._remaining[name] -= view.nbytes
        if self._remaining[name] < 0:
            raise SizeMismatchError(
                f"{-self._remaining[name]:,} bytes more than planned",
                tensor=name,
                file=self._name,
                remedy=FAULT_IN_MEMOPT,
            )
        self._states[name].update(view)

    def finish(self) -> dict[str, str]:
        return {name: state.hexdigest() for name, state in self._states.items()}


class UnitWriter:
    """A unit's hub file and rank files at temporary paths; a TensorSink of whole tensors.

    `temporary`: the path for a file's name below the release. Every file is open until `finish`: one, and one a rank.
    """

    def __init__(self, unit: Unit, temporary: Callable[[str], Path]) -> None:
        self._cuts: dict[str, Cut] = {}
        self._fans: dict[str, FanOut] = {}
        self._by_rank: dict[int, UnitFile] = {}
        outputs = [(output, plan) for plan in unit.tensors for output in plan.outputs]
        if unit.ranks is not None:
            self._cuts = {output.name: cut_of(output, plan, unit.ranks) for output, plan in outputs}
        same = frozenset(name for name, cut in self._cuts.items() if cut.kind in _SAME_AS_WHOLE)
        with ExitStack() as stack:
            self._hub: UnitFile | _WholeHash = _WholeHash(unit.hub_file)
            if unit.writes_hub:
                path = temporary(unit.file_name)
                self._hub = stack.enter_context(UnitFile(path, unit.hub_file.header, unit.layout))
            for file in unit.rank_files:
                if file.rank is not None:
                    out = UnitFile(temporary(file.name), file.header, file.layout, same)
                    self._by_rank[file.rank] = stack.enter_context(out)
            self._stack = stack.pop_all()
        if unit.ranks is not None:
            self._fans = {output.name: self._fan(output) for output, _ in outputs}

    def _fan(self, output: OutputTensor) -> FanOut:
        cut = self._cuts[output.name]
        return FanOut(output, cut, [self._by_rank[rank] for rank in cut.holders])

    def append(self, name: str, chunk: Bytes, /) -> None:
        """Take the next bytes of tensor `name`, whole rows of it; SizeMismatchError if they are more than planned."""
        self._hub.append(name, chunk)
        if name in self._fans:
            self._fans[name].append(memoryview(chunk).cast("B"))

    def finish(self) -> UnitDigests:
        """Flush every file to disk and close it. SizeMismatchError if a tensor got less than planned."""
        whole = self._hub.finish()
        found = {rank: file.finish() for rank, file in self._by_rank.items()}
        ranks: dict[str, tuple[str, ...]] = {}
        for name, cut in self._cuts.items():
            ranks[name] = (
                (whole[name],) if cut.kind in _SAME_AS_WHOLE else tuple(found[rank][name] for rank in cut.holders)
            )
        return UnitDigests(whole, ranks)

    def __enter__(self) -> UnitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
