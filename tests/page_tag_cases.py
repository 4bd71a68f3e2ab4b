"""Block tables with recorded tags, damaged in every way that a tag check must find, or must not mind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memopt.kernels.kv_cache.page_tags_reference import NO_MISMATCH, PageTagCheck
from memopt.kernels.layout import NO_TAG


@dataclass(frozen=True)
class TagCase:
    """The arguments of `verify_page_tags`; `expected` is right for an undamaged table."""

    block_table: Tensor
    num_pages: Tensor
    tags: Tensor
    expected: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order that `verify_page_tags` takes them."""
        return self.block_table, self.num_pages, self.tags, self.expected


def sound_case(num_requests: int, max_pages: int, num_physical_pages: int, seed: int) -> TagCase:
    """Random tables and counts, every record right; entries past a request's count are stale garbage."""
    generator = torch.Generator().manual_seed(seed)

    def random(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    tags = random(1, 1 << 62, num_physical_pages)
    table = random(0, num_physical_pages, num_requests, max_pages)
    num_pages = random(0, max_pages + 1, num_requests)
    is_stale = torch.arange(max_pages)[None, :] >= num_pages[:, None]
    expected = torch.where(is_stale, random(-(1 << 62), 1 << 62, num_requests, max_pages), tags[table])
    table = torch.where(is_stale, random(-(1 << 31), 1 << 31, num_requests, max_pages), table)
    return TagCase(table.to(torch.int32), num_pages.to(torch.int32), tags, expected)


def damaged_case(num_requests: int, max_pages: int, num_physical_pages: int, seed: int) -> TagCase:
    """A sound case with up to six damages: tables, records, tags and counts."""
    case = sound_case(num_requests, max_pages, num_physical_pages, seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def below(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    for _ in range(below(7)):
        request, position, page = below(num_requests), below(max_pages), below(num_physical_pages)
        kind = below(6)
        if kind == 0:
            case.tags[page] += 1
        elif kind == 1:
            case.block_table[request, position] = page
        elif kind == 2:
            case.block_table[request, position] = (-1, num_physical_pages, -(1 << 31), (1 << 31) - 1)[below(4)]
        elif kind == 3:
            case.expected[request, position] ^= 1 << (32 + below(31))
        elif kind == 4:
            case.num_pages[request] = (-1, max_pages + 1, -(1 << 31), (1 << 31) - 1)[below(4)]
        else:
            case.tags[page] = NO_TAG
            case.expected[case.block_table == page] = NO_TAG
    return case


def one_past_the_pool() -> TagCase:
    """Request 1 reads the page after the pool's last, where memory happens to hold the tag that it recorded."""
    tags, table = torch.tensor([5, 6, 7]), torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    return TagCase(table, torch.tensor([2, 2], dtype=torch.int32), tags[:2], tags[table.to(torch.int64)])


def poisoned_result(num_requests: int) -> PageTagCheck:
    """Results full of bytes that no check writes."""
    return PageTagCheck(*(torch.full((num_requests,), 0x25A5A5A5, dtype=torch.int32) for _ in range(2)))


def first_mismatches(case: TagCase) -> list[int]:
    """Position of the first mismatch of each request, one entry after another."""
    tags = case.tags.tolist()
    found = []
    for pages, count, expected in zip(
        case.block_table.tolist(), case.num_pages.tolist(), case.expected.tolist(), strict=True
    ):
        num_checked = min(max(count, 0), len(pages))
        wrong = [
            i
            for i in range(num_checked)
            if not 0 <= pages[i] < len(tags) or tags[pages[i]] != expected[i] or expected[i] == NO_TAG
        ]
        found.append(wrong[0] if wrong else NO_MISMATCH if count == num_checked else num_checked)
    return found
