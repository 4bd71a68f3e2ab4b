"""Every transport brings the very pages, rounded as the target's format rounds, and tells of what went wrong."""

from __future__ import annotations

import mmap
import os
import socket
from dataclasses import replace
from typing import Any

import pytest
import torch
from hand_over_cases import gqa_pools, hand_over_of, mla_pools, tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from page_transports import TRANSPORTS, transport, wait_for
from refusals import refusal

from memopt.errors import HandOverError, PeerError, UsageError
from memopt.kernels.kv_cache.kv_format import indexer_views
from memopt.kernels.kv_cache.kv_load import read_gqa_tokens, read_mla_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_cache.kv_store_reference import gqa_store, mla_store
from memopt.kernels.kv_formats import BF16, FP8_DS_MLA, FP8_E4M3, KvFormat
from memopt.kernels.layout import MLA_LATENT_SIZE
from memopt.runtime.kv.layer_kv import GqaLayerKv, KvPools, MlaLayerKv
from memopt.runtime.stages.frames import FrameKind, render_head
from memopt.runtime.stages.page_transport import Answer, Cancelled, Offer
from memopt.runtime.stages.page_transport_shared_memory import SharedMemoryPageReceiver, SharedMemoryPageSender
from memopt.runtime.stages.shared_region import new_shared_region, open_shared_region

SOURCE_PAGES, PAGES = [7, 2, 5], [1, 6, 3]


def expected_pools(source: KvPools, target: KvPools, num_tokens: int) -> KvPools:
    """What must be in the target's pools, by the reference stores."""
    source_slots = slots_of_pages(torch.tensor(SOURCE_PAGES), num_tokens)
    slots = slots_of_pages(torch.tensor(PAGES), num_tokens)
    for old, new in zip(source.layers, target.layers, strict=True):
        if isinstance(old, MlaLayerKv) and isinstance(new, MlaLayerKv):
            tokens = read_mla_tokens(old.pool, source_slots, BF16)
            latent, rope = tokens[:, :MLA_LATENT_SIZE], tokens[:, MLA_LATENT_SIZE:]
            mla_store(latent, rope, new.pool, slots, new.kv_format, new.scale)
            if old.indexer_pool is not None and new.indexer_pool is not None:
                before, after = indexer_views(old.indexer_pool), indexer_views(new.indexer_pool)
                for name in ("keys", "scales"):
                    getattr(after, name)[slots // 64, slots % 64] = getattr(before, name)[
                        source_slots // 64, source_slots % 64
                    ]
        else:
            assert isinstance(old, GqaLayerKv)
            assert isinstance(new, GqaLayerKv)
            key, value = (read_gqa_tokens(pool, source_slots, BF16) for pool in (old.key_pool, old.value_pool))
            gqa_store(key, value, new.key_pool, new.value_pool, slots, new.kv_format, new.k_scale, new.v_scale)
    return target


def assert_same_bytes(one: KvPools, other: KvPools) -> None:
    for layer, twin in zip(one.layers, other.layers, strict=True):
        for pool, wanted in zip(tensors_of(layer), tensors_of(twin), strict=True):
            assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))


CASES = [
    (mla_pools, BF16), (mla_pools, FP8_E4M3), (mla_pools, FP8_DS_MLA), (gqa_pools, BF16), (gqa_pools, FP8_E4M3),
]  # fmt: skip


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize(("new_pools", "kv_format"), CASES)
@pytest.mark.parametrize("num_tokens", [129, 192])
def test_pages_arrive_in_the_targets_format(kind: str, new_pools: Any, kv_format: KvFormat, num_tokens: int) -> None:
    with transport(kind, new_pools(8)) as ends:
        target = new_pools(8, kv_format)
        sent = hand_over_of(ends.pools, SOURCE_PAGES, num_tokens)
        ends.sender.offer(sent)
        offer = wait_for(ends.receiver.poll)
        assert offer == Offer(sent)
        ends.receiver.fetch(offer.hand_over, target, PAGES)
        assert_same_bytes(target, expected_pools(ends.pools, new_pools(8, kv_format), num_tokens))
        assert ends.sender.poll() == []
        ends.receiver.take(1)
        assert wait_for(ends.sender.poll) == Answer(1, is_taken=True)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 500), st.permutations(range(1, 9)), st.permutations(range(1, 9)))
def test_any_length_and_order_of_pages_arrives(num_tokens: int, order: list[int], new_order: list[int]) -> None:
    num_pages = -(-num_tokens // 64)
    results = []
    for kind in ("local", "socket", "shared_memory"):
        with transport(kind, mla_pools(9)) as ends:
            target = mla_pools(9, FP8_DS_MLA)
            ends.sender.offer(hand_over_of(ends.pools, order[:num_pages], num_tokens))
            ends.receiver.fetch(wait_for(ends.receiver.poll).hand_over, target, new_order[:num_pages])
            results.append(target)
    assert_same_bytes(results[0], results[1])
    assert_same_bytes(results[0], results[2])
    read = read_mla_tokens(
        results[0].layers[1].pool,  # type: ignore[union-attr]
        slots_of_pages(torch.tensor(new_order[:num_pages]), num_tokens),
        FP8_DS_MLA,
    )
    assert bool(read.abs().sum(dim=1).gt(0).all())


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_every_offer_has_one_answer(kind: str) -> None:
    with transport(kind, mla_pools(8)) as ends:
        for number in (1, 2, 3):
            ends.sender.offer(hand_over_of(ends.pools, [number], 10, number=number))
        found: list[object] = []
        while len(found) < 3:
            found += ends.receiver.poll()
        for _ in range(2):
            ends.receiver.take(2)
            ends.receiver.refuse(2, "late")
            ends.receiver.refuse(1, "no")
        ends.receiver.take(3)
        answers: list[Answer] = []
        while len(answers) < 3:
            answers += ends.sender.poll()
        assert answers == [Answer(2, is_taken=True), Answer(1, is_taken=False, reason="no"), Answer(3, is_taken=True)]
        assert ends.sender.poll() == []


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_cancelled_offer_is_still_answered(kind: str) -> None:
    with transport(kind, mla_pools(8)) as ends:
        ends.sender.offer(hand_over_of(ends.pools, [1], 10))
        wait_for(ends.receiver.poll)
        ends.sender.cancel(1)
        assert wait_for(ends.receiver.poll) == Cancelled(1)
        assert ends.sender.poll() == []
        ends.receiver.refuse(1, "cancelled")
        assert wait_for(ends.sender.poll) == Answer(1, is_taken=False, reason="cancelled")
        ends.sender.cancel(1)
        ends.sender.cancel(99)
        assert ends.receiver.poll() == []


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_closed_sender_is_noticed(kind: str) -> None:
    with transport(kind, mla_pools(8)) as ends:
        ends.sender.offer(hand_over_of(ends.pools, [1], 10))
        offer = wait_for(ends.receiver.poll)
        ends.sender.close()
        with pytest.raises(PeerError):
            ends.receiver.fetch(offer.hand_over, mla_pools(8), [2])
        with pytest.raises(PeerError):
            ends.receiver.poll()
        ends.receiver.take(1)
        with pytest.raises(PeerError):
            ends.sender.poll()
        with pytest.raises(PeerError):
            ends.sender.offer(hand_over_of(ends.pools, [1], 10, number=2))


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_closed_receiver_is_noticed(kind: str) -> None:
    with transport(kind, mla_pools(8)) as ends:
        ends.sender.offer(hand_over_of(ends.pools, [1], 10))
        ends.receiver.close()
        with pytest.raises(PeerError):
            wait_for(ends.sender.poll)


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("tag", ["reallocated", "never given out"])
def test_a_page_that_was_given_to_somebody_else_is_not_taken(kind: str, tag: str) -> None:
    with transport(kind, mla_pools(8)) as ends:
        tags = list(ends.tracker.on_allocate([3, 4]))
        ends.sender.offer(hand_over_of(ends.pools, [3, 4], 100, tags=tags))
        offer = wait_for(ends.receiver.poll)
        if tag == "reallocated":
            ends.tracker.on_allocate([4])
        else:
            ends.tracker.tags[3] = 0
        # The sender finds it itself, and cuts the connection; or the receiver does.
        with pytest.raises((HandOverError, PeerError)):
            ends.receiver.fetch(offer.hand_over, mla_pools(8), [1, 2])


@pytest.mark.parametrize("kind", ["local", "shared_memory"])
@pytest.mark.parametrize("page", [0, 8, 2**40])
def test_a_page_outside_the_senders_pools_is_refused(kind: str, page: int) -> None:
    with transport(kind, mla_pools(8)) as ends:
        ends.sender.offer(hand_over_of(ends.pools, [page], 10))
        with refusal(HandOverError, f"page {page} "):
            ends.receiver.fetch(wait_for(ends.receiver.poll).hand_over, mla_pools(8), [1])


def test_tails_of_pages_do_not_leave_the_sender() -> None:
    """Bytes behind the last token are another request's: a socket carries zeros instead."""
    with transport("socket", mla_pools(8)) as ends:
        target = mla_pools(8)
        ends.sender.offer(hand_over_of(ends.pools, [3], 5))
        ends.receiver.fetch(wait_for(ends.receiver.poll).hand_over, target, [2])
        first = target.layers[0]
        assert isinstance(first, MlaLayerKv)
        assert first.indexer_pool is not None
        assert int(indexer_views(first.indexer_pool).keys[2, 5:].sum()) == 0
        assert float(indexer_views(first.indexer_pool).scales[2, 5:].abs().sum()) == 0


def test_shared_memory_cannot_be_written_by_the_reader() -> None:
    region = new_shared_region(mla_pools(4))
    with pytest.raises(PermissionError):
        mmap.mmap(region.file_descriptor, region.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.ftruncate(region.file_descriptor, 10)
    geometry = hand_over_of(region.pools, [1], 1).geometry
    for wrong in (replace(geometry, layers=geometry.layers[:1]), replace(geometry, layers=geometry.layers * 2)):
        with refusal(HandOverError, "sealed"):
            open_shared_region(region.file_descriptor, wrong, 4)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, region.size_bytes)
    with refusal(HandOverError):
        open_shared_region(unsealed, geometry, 4)
    region.pools.layers[0].pool[2] = 3.0  # type: ignore[union-attr]
    region.tags[1] = 2**62 + 1
    seen = open_shared_region(region.file_descriptor, geometry, 4)
    assert torch.equal(seen.pools.layers[0].pool, region.pools.layers[0].pool)  # type: ignore[union-attr]
    assert int(seen.tags[1]) == 2**62 + 1
    for descriptor in (unsealed, region.file_descriptor):
        os.close(descriptor)


@pytest.mark.parametrize(
    "first", [b"", b"MOHO", b"MOHO" + bytes(60), render_head(FrameKind.TAKEN, [b"12345678"]) + b"12345678"]
)
def test_a_receiver_of_shared_memory_wants_a_region_first(first: bytes) -> None:
    one, other = socket.socketpair()
    one.sendall(first)
    one.close()
    with pytest.raises((HandOverError, PeerError)):
        SharedMemoryPageReceiver(other, timeout_seconds=1.0)


def test_memory_is_not_shared_over_tcp() -> None:
    region = new_shared_region(mla_pools(2))
    with socket.socket() as connected, refusal(UsageError, "Unix socket", "SocketPageSender"):
        SharedMemoryPageSender(connected, region)
    os.close(region.file_descriptor)


def test_a_peer_that_is_gone_at_once_leaves_nothing_open() -> None:
    region = new_shared_region(mla_pools(2))
    for new in (lambda end: SharedMemoryPageSender(end, region), SharedMemoryPageReceiver):
        one, other = socket.socketpair()
        one.close()
        with refusal(PeerError):
            new(other)
        assert other.fileno() == -1
    os.close(region.file_descriptor)
