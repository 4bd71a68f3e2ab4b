"""The indexer under several ranks, and the choice between all tokens and a selection."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from attention_steps import PagedSequences, Part
from torch import Tensor
from transformers_attention import AttentionPair, RoundedCache, glm_dsa_pair, hidden_states

from memopt.errors import ContentError
from memopt.kernels.kv_cache.kv_load import read_indexer_keys
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_formats import BF16, FP32
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.layer_kv import MlaLayerKv
from memopt.runtime.model.mla_attention import MlaAttention
from memopt.runtime.model.rope import RotaryTable
from memopt.runtime.model.selection import Selection
from memopt.runtime.parallel.communicator import SingleRank

TOP_K, TOKENS = 8, 40


@dataclass
class TwoRanks(SingleRank):
    """One of two ranks, whose messages are already known: rank 0's positions, and the other's flags."""

    rank: int = 0  # type: ignore[misc]
    num_ranks: int = 2  # type: ignore[misc]
    positions: Tensor | None = None
    other_flags: int = 0
    sent: list[Tensor] = field(default_factory=list)

    def from_first(self, values: Tensor) -> Tensor:
        self.sent.append(values.clone())
        return values if self.positions is None else values.copy_(self.positions)

    def maximum(self, values: Tensor) -> Tensor:
        return values.clamp(min=self.other_flags)


@dataclass(frozen=True)
class Case:
    """A layer with an indexer, its pools and a sequence of TOKENS."""

    pair: AttentionPair
    sequences: PagedSequences
    kv: MlaLayerKv

    def selection(self, ranks: SingleRank, parts: list[Part], checks_ranks: bool = False) -> Selection | None:
        block = self.pair.block()
        assert isinstance(block, MlaAttention)
        assert block.indexer is not None
        indexer = replace(block.indexer, communicator=ranks, checks_ranks=checks_ranks)
        rotary = RotaryTable(self.pair.config.rope)
        return self.sequences.run(replace(block, indexer=indexer), self.kv, rotary, [parts])[1]


@pytest.fixture
def case() -> Case:
    pair, sequences = glm_dsa_pair(TOP_K), PagedSequences(hidden_states([TOKENS]))
    kv = new_kv_pools(pair.config, BF16, sequences.num_pages, num_layers=1, num_kv_heads_here=1).layers[0]
    assert isinstance(kv, MlaLayerKv)
    return Case(pair, sequences, kv)


def test_everything_is_kept_up_to_top_k_and_keys_are_stored(case: Case) -> None:
    assert case.selection(SingleRank(), [Part(0, 0, TOP_K, True)]) is None
    assert case.kv.indexer_pool is not None
    keys = read_indexer_keys(case.kv.indexer_pool, slots_of_pages(case.sequences.table[0], TOKENS))
    assert bool((keys[:TOP_K] != 0).any(dim=1).all())
    assert not bool(keys[TOP_K:].any())
    chosen = case.selection(SingleRank(), [Part(0, TOP_K, TOP_K + 1, False)])
    assert chosen is not None
    assert chosen.positions.shape == (1, TOP_K)


def test_stored_keys_are_those_of_transformers_however_small() -> None:
    """Before their norm they are about as small as its epsilon."""
    pair, hidden = glm_dsa_pair(TOP_K), hidden_states([TOKENS])[0]
    with torch.no_grad():
        pair.module.indexer.wk.weight.mul_(1e-3)
    seen: list[Tensor] = []

    def keep(key: Tensor) -> Tensor:
        seen.append(key)
        return key

    pair.outputs(hidden, cache=RoundedCache(lambda latent, rope: (latent, rope), keep))
    sequences = PagedSequences([hidden])
    kv = new_kv_pools(pair.config, FP32, sequences.num_pages, num_layers=1, num_kv_heads_here=1).layers[0]
    assert isinstance(kv, MlaLayerKv)
    assert kv.indexer_pool is not None
    sequences.run(pair.block(), kv, RotaryTable(pair.config.rope), [[Part(0, 0, TOKENS, True)]])
    stored = read_indexer_keys(kv.indexer_pool, slots_of_pages(sequences.table[0], TOKENS))
    size = seen[0].shape[2]
    torch.testing.assert_close(stored[:, :size], seen[0][0], rtol=1e-5, atol=1e-5)
    assert not bool(stored[:, size:].any())


def test_short_rows_beside_long_ones_keep_everything(case: Case) -> None:
    chosen = case.selection(SingleRank(), [Part(0, 0, TOKENS, True)])
    assert chosen is not None
    for row in range(TOP_K):
        assert chosen.positions[row].tolist() == [*range(row + 1), *[-1] * (TOP_K - row - 1)]
    assert bool((chosen.positions[TOP_K:] >= 0).all())


def test_rank_0_selects_for_the_others(case: Case) -> None:
    parts = [Part(0, 0, TOKENS, True)]
    first = TwoRanks(rank=0)
    own = case.selection(first, parts)
    assert own is not None
    assert torch.equal(first.sent[0], own.positions)
    foreign = own.positions.flip(0)
    found = case.selection(TwoRanks(rank=1, positions=foreign), parts)
    assert found is not None
    assert torch.equal(found.positions, foreign)


def test_ranks_are_compared_if_asked(case: Case) -> None:
    parts = [Part(0, 0, TOKENS, True)]
    own = case.selection(SingleRank(), parts)
    assert own is not None
    same = case.selection(TwoRanks(rank=1, positions=own.positions), parts, checks_ranks=True)
    assert same is not None
    assert torch.equal(same.positions, own.positions)
    other = own.positions.clone()
    other[30, 0] = other[30, 1]
    with pytest.raises(ContentError, match=r"other tokens than rank 0 for rows \[30\]"):
        case.selection(TwoRanks(rank=1, positions=other), parts, checks_ranks=True)
    # Rank 0 agrees with itself, but learns of the other.
    with pytest.raises(ContentError, match="rank 0 for rows"):
        case.selection(TwoRanks(rank=0, other_flags=1), parts, checks_ranks=True)
