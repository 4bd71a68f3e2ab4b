"""Two stages over a socket: the receiver pulls pages when it has room, as frames under a digest."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch

from memopt.errors import HandOverError
from memopt.runtime.integrity.tracker import PageTracker
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.stages.frame_connection import FrameConnection
from memopt.runtime.stages.frames import FrameKind, parse_slice, slice_head
from memopt.runtime.stages.hand_over import HandOver
from memopt.runtime.stages.kv_geometry import geometry_of
from memopt.runtime.stages.offer_connection import OfferConnection
from memopt.runtime.stages.offer_inbox import OfferInbox
from memopt.runtime.stages.offered_pages import require_offered_tags
from memopt.runtime.stages.page_conversion import convert_layer, device_of
from memopt.runtime.stages.page_slices import layer_of_bytes, page_slices, slice_bytes, tokens_in
from memopt.runtime.stages.page_transport import Answer, Cancelled, Offer


class SocketPageSender:
    """The sender's end (page_transport.PageSender): pages are copied out of `pools` by a thread of its own."""

    def __init__(
        self, connected: socket.socket, pools: KvPools, tracker: PageTracker, *, timeout_seconds: float = 60.0
    ) -> None:
        """`connected`: a stream socket, ours from now on. `pools` (BF16) and `tracker`: the engine's."""
        self._pools = pools
        self._tracker = tracker
        self._geometry = geometry_of(pools)
        self._connection = FrameConnection(connected, timeout_seconds=timeout_seconds)
        self._offers = OfferConnection(self._connection, self._send_pages)

    def offer(self, hand_over: HandOver) -> None:
        """See PageSender."""
        self._offers.offer(hand_over)

    def cancel(self, number: int) -> None:
        """See PageSender."""
        self._offers.cancel(number)

    def poll(self) -> list[Answer]:
        """See PageSender."""
        return self._offers.poll()

    def close(self) -> None:
        """See PageSender."""
        self._offers.close()

    def _send_pages(self, hand_over: HandOver, is_wanted: Callable[[], bool]) -> None:
        pages = [held.page for held in hand_over.pages]
        for part in page_slices(hand_over.number, self._geometry, len(pages)):
            chosen = pages[part.first_page : part.first_page + part.num_pages]
            data = slice_bytes(self._pools.layers[part.layer], chosen, tokens_in(part, hand_over.num_tokens))
            try:
                require_offered_tags(hand_over, self._tracker.tag_of, self._pools.num_pages, "after")
            except HandOverError:
                if is_wanted():
                    raise
            if not is_wanted():
                return
            self._connection.send(FrameKind.PAGES, slice_head(part), *data)


class SocketPageReceiver:
    """The receiver's end (page_transport.PageReceiver). `fetch` keeps the engine waiting while pages come in."""

    def __init__(self, connected: socket.socket, *, timeout_seconds: float = 60.0) -> None:
        """`connected`: a stream socket, ours from now on. `timeout_seconds`: also how long to wait for a page."""
        self._timeout_seconds = timeout_seconds
        self._inbox = OfferInbox(FrameConnection(connected, timeout_seconds=timeout_seconds))

    def poll(self) -> list[Offer | Cancelled]:
        """See PageReceiver."""
        return self._inbox.poll()

    def fetch(self, hand_over: HandOver, pools: KvPools, pages: list[int]) -> None:
        """See PageReceiver."""
        device = device_of(pools)
        numbers = torch.tensor(pages, dtype=torch.int64, device=device)
        self._inbox.pull_pages(hand_over.number)
        for expected in page_slices(hand_over.number, hand_over.geometry, len(pages)):
            while True:
                part, data = parse_slice(self._inbox.next_pages(hand_over.number, self._timeout_seconds))
                # Pages of an offer that was cancelled while they were under way.
                if part.number >= expected.number:
                    break
            if part != expected:
                self._inbox.break_off(f"the sender sent {part}, but {expected} comes next")
            shape = hand_over.geometry.layers[part.layer]
            if len(data) != part.num_pages * shape.page_bytes:
                self._inbox.break_off(f"{part} has {len(data):,} bytes, not {part.num_pages * shape.page_bytes:,}")
            source = layer_of_bytes(data, shape, part.num_pages, device)
            arrived = torch.arange(part.num_pages, device=device)
            target = numbers[part.first_page : part.first_page + part.num_pages]
            convert_layer(source, arrived, pools.layers[part.layer], target, tokens_in(part, hand_over.num_tokens))

    def take(self, number: int) -> None:
        """See PageReceiver."""
        self._inbox.take(number)

    def refuse(self, number: int, reason: str) -> None:
        """See PageReceiver."""
        self._inbox.refuse(number, reason)

    def close(self) -> None:
        """See PageReceiver."""
        self._inbox.close()
