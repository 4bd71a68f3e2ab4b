"""One layer's attention driven over pages: steps of prompt chunks and decode rows, as the engine makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from memopt.kernels.layout import PADDING_SLOT, PAGE_TOKENS
from memopt.runtime.kv.layer_kv import LayerKv
from memopt.runtime.model.attention_block import AttentionBlock
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.selection import Selection
from memopt.runtime.model.step_rows import PrefillChunk, StepRows


@dataclass(frozen=True)
class Part:
    """Tokens `first` to `after` of a request, as one chunk of its prompt or as decode rows."""

    request: int
    first: int
    after: int
    is_prompt: bool


@dataclass
class PagedSequences:
    """Hidden states of requests, and the pages that hold them in permuted order; page 0 is nobody's."""

    hidden: list[Tensor]  # each [T, hidden]
    table: Tensor = field(init=False)  # int32 [requests, max_pages]

    def __post_init__(self) -> None:
        width = -(-max(states.shape[0] for states in self.hidden) // PAGE_TOKENS)
        order = torch.randperm(len(self.hidden) * width, generator=torch.Generator().manual_seed(7)) + 1
        self.table = order.to(torch.int32).view(len(self.hidden), width)

    @property
    def num_pages(self) -> int:
        """Pages of a pool that holds all of it, the dummy page included."""
        return self.table.numel() + 1

    def rows(self, parts: Sequence[Part], padding: int = 0) -> tuple[StepRows, Tensor]:
        """The rows of a step, prompts first, `padding` dummy decode rows last, and their hidden states."""
        parts = sorted(parts, key=lambda part: not part.is_prompt)
        chunks: list[PrefillChunk] = []
        first_row = 0
        for part in parts:
            if part.is_prompt:
                chunks.append(PrefillChunk(first_row, part.after - part.first, part.first))
            first_row += part.after - part.first
        positions = [position for part in parts for position in range(part.first, part.after)]
        requests = [part.request for part in parts for _ in range(part.first, part.after)]
        where, which = torch.tensor(positions + [0] * padding), torch.tensor(requests + [0] * padding)
        table = self.table[which].clone()
        slots = table[torch.arange(where.shape[0]), where // PAGE_TOKENS].to(torch.int64) * PAGE_TOKENS
        slots += where % PAGE_TOKENS
        if padding:
            table[-padding:], slots[-padding:] = 0, PADDING_SLOT
        hidden = [self.hidden[request][position] for request, position in zip(requests, positions, strict=True)]
        hidden += [torch.zeros_like(self.hidden[0][0])] * padding
        rows = StepRows(
            torch.zeros_like(where), where, slots, table, (where + 1).to(torch.int32), tuple(chunks),
            int(where.max()) + 1,
        )  # fmt: skip
        return rows, torch.stack(hidden)

    def run(
        self,
        block: AttentionBlock,
        kv: LayerKv,
        rotary: RotaryTable,
        steps: Sequence[Sequence[Part]],
        *,
        padding: int = 0,
        selection: Selection | None = None,
    ) -> tuple[list[Tensor], Selection | None]:
        """Outputs of every request [T, hidden], NaN where no step computed a token, and the last step's selection."""
        outputs = [torch.full_like(states, torch.nan) for states in self.hidden]
        chosen = selection
        for parts in steps:
            rows, hidden = self.rows(parts, padding)
            output, chosen = block(hidden, rows, kv, selection, rotary.cos_sin(rows.positions))
            at = 0
            for part in sorted(parts, key=lambda part: not part.is_prompt):
                count = part.after - part.first
                outputs[part.request][part.first : part.after] = output[at : at + count]
                at += count
        return outputs, chosen
