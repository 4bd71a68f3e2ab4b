"""Units: which tensors go into which output file, where, and the file's header; all fixed before a weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from memopt.compressor.tensor_plan import OutputTensor, TensorPlan
from memopt.manifests.dtypes import ITEM_SIZE_BYTES
from memopt.manifests.safetensors_header import DATA_ALIGNMENT_BYTES, TensorHeader, render_header

# transformers refuses a file without it.
FILE_METADATA = {"format": "pt"}
# Two files a GLM-5.2 MoE layer: big enough to stream, small enough that a crash loses little.
DEFAULT_MAX_FILE_BYTES = 4 * 10**9


@dataclass(frozen=True)
class Unit:
    """One output file. `number` counts from 1. `tensors`: plans in file order. `layout`: outputs by rising offset."""

    number: int
    file_name: str
    tensors: tuple[TensorPlan, ...]
    layout: tuple[TensorHeader, ...]

    @cached_property
    def header(self) -> bytes:
        return render_header(self.layout, FILE_METADATA)

    @property
    def data_size_bytes(self) -> int:
        return self.layout[-1].end if self.layout else 0

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.data_size_bytes

    @property
    def input_size_bytes(self) -> int:
        return sum(plan.source.size_bytes for plan in self.tensors)


def output_size_bytes(plan: TensorPlan) -> int:
    return sum(output.size_bytes for output in plan.outputs)


def _layers(plans: Iterable[TensorPlan]) -> Iterator[list[TensorPlan]]:
    """Runs of plans of one layer (or of no layer), in order."""
    run: list[TensorPlan] = []
    for plan in plans:
        if run and plan.source.spec.layer != run[-1].source.spec.layer:
            yield run
            run = []
        run.append(plan)
    if run:
        yield run


def _split(run: list[TensorPlan], max_file_bytes: int) -> Iterator[list[TensorPlan]]:
    """Cut one layer into the fewest near-equal pieces of about `max_file_bytes`; a tensor is never cut."""
    total = sum(output_size_bytes(plan) for plan in run)
    num_pieces = -(-total // max_file_bytes)
    piece: list[TensorPlan] = []
    number = done = 0
    for plan in run:
        size = output_size_bytes(plan)
        # The piece that the tensor's middle falls into, were the layer cut into equal parts.
        home = min(num_pieces - 1, (2 * done + size) * num_pieces // (2 * total))
        if piece and home != number:
            yield piece
            piece = []
        number = home
        piece.append(plan)
        done += size
    if piece:
        yield piece


def _alignment_rank(output: OutputTensor) -> tuple[bool, int]:
    is_ragged = output.size_bytes % DATA_ALIGNMENT_BYTES != 0
    return is_ragged, -ITEM_SIZE_BYTES[output.dtype] if is_ragged else 0


def _layout(plans: Iterable[TensorPlan]) -> tuple[TensorHeader, ...]:
    """Offsets: plan order, but tensors whose size is not a multiple of 8 last, widest type first.

    So every tensor starts at a multiple of its item size without padding, which the format does not allow.
    """
    outputs: list[OutputTensor] = [output for plan in plans for output in plan.outputs]
    outputs.sort(key=_alignment_rank)
    position = 0
    layout: list[TensorHeader] = []
    for output in outputs:
        end = position + output.size_bytes
        layout.append(TensorHeader(output.name, output.dtype, output.shape, position, end))
        position = end
    return tuple(layout)


def build_units(plans: tuple[TensorPlan, ...], max_file_bytes: int = DEFAULT_MAX_FILE_BYTES) -> tuple[Unit, ...]:
    """Layer-aligned files of at most about `max_file_bytes`: small layers share a file, a large one is cut."""
    files: list[list[TensorPlan]] = []
    open_size = 0
    for run in _layers(plan for plan in plans if plan.outputs):
        size = sum(output_size_bytes(plan) for plan in run)
        if files and open_size and open_size + size <= max_file_bytes:
            files[-1] += run
            open_size += size
        elif size <= max_file_bytes:
            files.append(list(run))
            open_size = size
        else:
            files += _split(run, max_file_bytes)
            open_size = 0
    count = len(files)
    return tuple(
        Unit(number, f"model-{number:05d}-of-{count:05d}.safetensors", tuple(tensors), _layout(tensors))
        for number, tensors in enumerate(files, start=1)
    )
