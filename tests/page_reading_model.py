"""A model without weights for tests of the engine: its next token is a hash of all tokens that it finds in the pages.

It stores token ids where a real one stores keys, and reads them back through each row's block table. So a wrong page, a
wrong slot or a wrong length changes the tokens that come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memopt.kernels.kv_formats import BF16
from memopt.kernels.layout import PAGE_TOKENS
from memopt.runtime.engine.admission import EngineLimits
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.events import TokenEvent
from memopt.runtime.engine.request import Request
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.kv.layer_kv import KvPools, MlaLayerKv
from memopt.runtime.model.step_rows import StepRows

VOCAB_SIZE = 97
EOS = 0
# A prime below 2**31, and a multiplier: a polynomial hash whose products stay below 2**63.
_MODULUS, _FACTOR = 2147483647, 1000003


class PageReadingModel:
    """`rows_seen` counts rows; `longest_step` is the largest number of rows of a step."""

    def __init__(self) -> None:
        self.rows_seen = 0
        self.longest_step = 0

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        """float64 [R, 1]: the hash of the tokens that each row reads, its own among them."""
        self.rows_seen += rows.num_rows
        self.longest_step = max(self.longest_step, rows.num_rows)
        assert rows.num_prefill_rows <= rows.num_rows
        layer = pools.layers[0]
        assert isinstance(layer, MlaLayerKv)
        written = rows.slots >= 0
        layer.pool.view(-1)[rows.slots[written]] = rows.token_ids[written]
        hashes = []
        for table, num_tokens in zip(rows.block_table.tolist(), rows.num_tokens.tolist(), strict=True):
            pages = table[: -(-num_tokens // PAGE_TOKENS)]
            hashes.append(hash_of(layer.pool[pages].flatten()[:num_tokens].tolist()))
        return torch.tensor(hashes, dtype=torch.float64)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab]: pseudo-random logits that the hash decides."""
        logits = [logits_of(int(value)) for value in hidden[:, 0].tolist()]
        return torch.stack(logits)


def hash_of(tokens: Sequence[int]) -> int:
    """A number that every token and every place decides."""
    value = 1
    for token in tokens:
        value = (value * _FACTOR + token + 1) % _MODULUS
    return value


def logits_of(value: int) -> Tensor:
    """float32 [vocab]: the logits that a hash stands for."""
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(value))


def expected_tokens(prompt: Sequence[int], num_tokens: int, *, eos: int | None = None) -> list[int]:
    """What a greedy request must generate, computed without pages."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < num_tokens:
        tokens.append(int(logits_of(hash_of(tokens)).argmax()))
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


def new_pools(num_pages: int) -> KvPools:
    """One layer that keeps a token id a slot."""
    pool = torch.zeros(num_pages, PAGE_TOKENS, dtype=torch.int64)
    return KvPools(BF16, num_pages, (MlaLayerKv(pool, None, None, BF16),))


def new_core(num_pages: int = 64, **options: object) -> EngineCore:
    """An engine core around a PageReadingModel. `options`: of EngineLimits, or of EngineCore."""
    limits = {"max_requests": 8, "max_step_tokens": 64, "max_tokens": 1024}
    for name in ("max_requests", "max_step_tokens", "max_tokens", "num_drafts"):
        if name in options:
            limits[name] = options.pop(name)  # type: ignore[assignment]
    defaults: dict[str, object] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS,)}
    return EngineCore(
        PageReadingModel(),
        new_pools(num_pages),
        EngineLimits(**limits),
        **(defaults | options),  # type: ignore[arg-type]
    )


def greedy(max_tokens: int) -> SamplingParams:
    """The likeliest tokens, the model's end among them."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def run(core: EngineCore, max_steps: int = 10_000) -> list[TokenEvent]:
    """Step until nothing is left to do; pages are counted after every step."""
    events = []
    for _ in range(max_steps):
        if not core.has_work:
            return events
        events += core.step()
        core.pages.check()
    raise AssertionError(f"still working after {max_steps} steps")


def generated(request: Request) -> list[int]:
    """The tokens that a request generated."""
    return request.tokens[request.num_prompt_tokens :]
