"""Reads the text of cuobjdump: registers and spills, and the instructions of a kernel's inner loop.

Loops are the natural loops of the control-flow graph, not the span of a backward branch: ptxas moves the retry of a
barrier wait behind the kernel's end, and its branch back would look like a loop over everything in between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", re.MULTILINE)
_ADDRESS = re.compile(r"(?:^|[\s,(`])0x([0-9a-f]+)\)?\s*$")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_WIDTH = re.compile(r"\.(8|16|32|64|128|256|U8|S8|U16|S16)(?:\.|$)")
# Copies of the bulk engine (TMA): a whole tile an instruction.
_BULK_LOADS = ("UBLKCP", "UTMALDG")
_BULK_BITS = 1024
_WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of SASS: its address in bytes, whether a predicate guards it, its operation and its operands."""

    address: int
    is_guarded: bool
    operation: str
    operands: str

    @property
    def base(self) -> str:
        """The operation without its modifiers: "LDG" of "LDG.E.128"."""
        return self.operation.split(".")[0]

    @property
    def target(self) -> int | None:
        """The address that a branch names, or None."""
        found = _ADDRESS.search(self.operands)
        return int(found[1], 16) if found else None

    @property
    def load_bits(self) -> int:
        """Bits that one thread loads from global memory, or 0."""
        if self.base in _BULK_LOADS:
            return _BULK_BITS
        if self.base not in ("LDG", "LDGSTS", "LD"):
            return 0
        widths = [int(width.lstrip("US")) for width in _WIDTH.findall(self.operation)]
        return widths[-1] if widths else _WORD_BITS


@dataclass(frozen=True)
class Resources:
    """What ptxas gave a kernel, a thread; `spill_bytes` is stack and local memory together."""

    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class Loop:
    """The body of the innermost loop that matters, or of the whole kernel when there is none."""

    instructions: tuple[Instruction, ...]
    is_whole_kernel: bool

    @property
    def count(self) -> int:
        """Instructions that issue, padding left out."""
        return sum(instruction.base != "NOP" for instruction in self.instructions)

    @property
    def widest_load_bits(self) -> int:
        """The widest load from global memory, 0 when there is none."""
        return max((instruction.load_bits for instruction in self.instructions), default=0)

    @property
    def num_local_accesses(self) -> int:
        """Loads from and stores to local memory: spills that are paid every turn."""
        return sum(instruction.base in ("LDL", "STL") for instruction in self.instructions)


def parse_resources(text: str) -> Resources:
    """Of `cuobjdump --dump-resource-usage`. Raises ValueError when the line is not there."""
    found = _RESOURCES.search(text)
    if found is None:
        raise ValueError(f"no resource line in {text!r}")
    registers, stack, _, local = map(int, found.groups())
    return Resources(registers, stack + local)


def parse_instructions(text: str) -> list[Instruction]:
    """Of `cuobjdump -sass`, one kernel. Raises ValueError when there are none."""
    found = [
        Instruction(int(address, 16), bool(guard) and guard.strip() != "@PT", operation, operands.strip())
        for address, guard, operation, operands in _LINE.findall(text)
    ]
    if not found:
        raise ValueError("no instruction in the disassembly")
    return found


def inner_loop(instructions: Sequence[Instruction]) -> Loop:
    """The largest of the innermost loops; loops that only wait for a barrier do not count as loops."""
    blocks = _blocks(instructions)
    edges = _edges(blocks)
    loops = _natural_loops(edges)
    waits = {header for header, body in loops.items() if _is_wait([i for b in body for i in blocks[b]])}
    waiting = {block for header in waits for block in loops[header]}
    real = {header: body - waiting for header, body in loops.items() if header not in waits}
    inner = [body for header, body in real.items() if not any(h != header and h in body for h in real)]
    largest = max(inner, key=lambda body: sum(len(blocks[b]) for b in body), default=None)
    chosen = sorted(edges.keys() - waiting if largest is None else largest)
    return Loop(tuple(i for b in chosen for i in blocks[b]), largest is None)


def _is_wait(body: Sequence[Instruction]) -> bool:
    return any(i.base == "SYNCS" for i in body) and not any(i.load_bits or i.base.endswith("MMA") for i in body)


def _blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Straight runs of instructions: each starts where a branch lands or after one."""
    jumps = ("BRA", "BSYNC", "EXIT", "RET", "BRX", "CALL")
    starts = {i.target for i in instructions if i.base in ("BRA", "BSSY")} | {instructions[0].address}
    blocks: list[list[Instruction]] = []
    for before, instruction in zip([None, *instructions], instructions, strict=False):
        if before is None or instruction.address in starts or before.base in jumps:
            blocks.append([])
        blocks[-1].append(instruction)
    return blocks


def _edges(blocks: Sequence[Sequence[Instruction]]) -> dict[int, list[int]]:
    """Block -> the blocks that may follow; only blocks that the first one reaches."""
    at = {block[0].address: index for index, block in enumerate(blocks)}
    reconverge = [
        (i.address, i.operands.split(",")[0].strip(), i.target) for block in blocks for i in block if i.base == "BSSY"
    ]
    edges: dict[int, list[int]] = {}
    pending = [0]
    while pending:
        index = pending.pop()
        if index in edges:
            continue
        last = blocks[index][-1]
        following: list[int] = []
        ends = last.base in ("EXIT", "RET", "BRX") or (last.base == "BRA" and not _is_conditional(last))
        if (not ends or last.is_guarded) and index + 1 < len(blocks):
            following.append(index + 1)
        if last.base == "BRA" and last.target in at:
            following.append(at[last.target])
        if last.base == "BSYNC":
            named = [t for a, name, t in reconverge if name == last.operands.strip() and a < last.address and t in at]
            following += [at[t] for t in named[-1:] if t is not None]
        edges[index] = [block for block in following if not (block == index and len(blocks[index]) == 1)]
        pending += following
    return edges


def _is_conditional(branch: Instruction) -> bool:
    # "BRA.U UP0, 0x…" and "BRA.DIV UR4, 0x…" carry their condition as an operand.
    return branch.is_guarded or "," in branch.operands


def _natural_loops(edges: dict[int, list[int]]) -> dict[int, set[int]]:
    """Header -> body, of every edge whose target dominates its source."""
    sources: dict[int, set[int]] = {block: set() for block in edges}
    for block, following in edges.items():
        for successor in following:
            sources[successor].add(block)
    dominators = {block: set(edges) for block in edges}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in sorted(edges):
            if block == 0 or not sources[block]:
                continue
            new = set.intersection(*(dominators[source] for source in sources[block])) | {block}
            if new != dominators[block]:
                dominators[block], changed = new, True
    loops: dict[int, set[int]] = {}
    for block, following in edges.items():
        for header in following:
            if header in dominators[block]:
                loops.setdefault(header, {header}).update(_reaching(block, header, sources))
    return loops


def _reaching(block: int, header: int, sources: dict[int, set[int]]) -> set[int]:
    """Blocks from which `block` is reached without passing `header`, itself included."""
    body: set[int] = set()
    pending = [block]
    while pending:
        current = pending.pop()
        if current not in body and current != header:
            body.add(current)
            pending += sources[current]
    return body
