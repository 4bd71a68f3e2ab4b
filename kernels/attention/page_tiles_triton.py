"""Where the tokens of a tile lie in a paged pool: runs of a page, or single positions that were selected."""

# Triton compiles these from the types it is called with.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_places(tile, end, table_row, num_pages, TILE: tl.constexpr, PAGE: tl.constexpr):
    """(page, place in page, counts) of tokens tile * TILE .. that lie in one page: page int64, the others [TILE].

    A token counts when it is before `end` and its page is one of the pool's. `table_row`: the request's page ids.
    """
    first = tile * TILE
    page = tl.load(table_row + first // PAGE, mask=first < end, other=0)
    is_page = (page >= 0) & (page < num_pages)
    offset = tl.arange(0, TILE)
    return page.to(tl.int64), first % PAGE + offset, first + offset < tl.where(is_page, end, 0)


@triton.jit
def long_run_places(tile, end, table_row, num_pages, TILE: tl.constexpr, PAGE: tl.constexpr):
    """As `run_places`, for tiles of several pages: the page is [TILE] too."""
    token = tile * TILE + tl.arange(0, TILE)
    page = tl.load(table_row + token // PAGE, mask=token < end, other=0)
    return page.to(tl.int64), token % PAGE, (token < end) & (page >= 0) & (page < num_pages)


@triton.jit
def selected_places(tile, end, table_row, positions_row, max_pages, num_pages, TILE: tl.constexpr, PAGE: tl.constexpr):
    """(page, place in page, counts), each [TILE], page int64, of the positions tile * TILE .. of a selection.

    A position counts when its index is before `end`, it lies inside the block table (-1 is padding), and its page is
    one of the pool's.
    """
    index = tile * TILE + tl.arange(0, TILE)
    position = tl.load(positions_row + index, mask=index < end, other=-1)
    counts = (position >= 0) & (position < max_pages * PAGE)
    position = tl.where(counts, position, 0)
    page = tl.load(table_row + position // PAGE, mask=counts, other=0)
    return page.to(tl.int64), position % PAGE, counts & (page >= 0) & (page < num_pages)


@triton.jit
def load_rows(
    pool, page_stride, page, place, counts, TOKEN: tl.constexpr, COLUMN: tl.constexpr, WIDTH: tl.constexpr,
    PAGE_PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Columns COLUMN .. COLUMN + WIDTH of the tokens' rows [TILE, WIDTH], zero where a token does not count.

    `page_stride` and `TOKEN`: elements of the pool from page to page and from token to token. PAGE_PER_TOKEN: `page` is
    [TILE], not one for all. What a page holds past its last token is never read: 0 * NaN is NaN.
    """
    start = pool + page * page_stride
    column = COLUMN + tl.arange(0, WIDTH)
    if PAGE_PER_TOKEN:
        start = start[:, None]
    return tl.load(start + (place[:, None] * TOKEN + column[None, :]), mask=counts[:, None], other=0)
