"""Two stages on one machine: the receiver reads pages where they lie, in memory that the sender shares."""

from __future__ import annotations

import json
import os
import socket
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memopt.errors import HandOverError, PeerError, UsageError
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.stages.frame_connection import FrameConnection
from memopt.runtime.stages.frames import Frame, FrameKind
from memopt.runtime.stages.hand_over import HandOver
from memopt.runtime.stages.kv_geometry import MAX_LAYERS, KvGeometry, geometry_of, parse_layer
from memopt.runtime.stages.offer_connection import OfferConnection
from memopt.runtime.stages.offer_inbox import OfferInbox
from memopt.runtime.stages.offered_pages import require_offered_tags
from memopt.runtime.stages.page_conversion import convert_pools
from memopt.runtime.stages.page_transport import Answer, Cancelled, Offer
from memopt.runtime.stages.shared_region import SharedRegion, open_shared_region


class _Region(BaseModel):
    """What a REGION frame says of the memory whose descriptor comes with it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    num_pages: Annotated[int, Field(ge=1, lt=2**31)]
    layers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=MAX_LAYERS)]


class SharedMemoryPageSender:
    """The sender's end (page_transport.PageSender)."""

    def __init__(self, connected: socket.socket, region: SharedRegion, *, timeout_seconds: float = 60.0) -> None:
        """`connected`: a Unix stream socket, ours from now on. `region`: where the engine has its pools and tags.

        Raises UsageError for another socket, PeerError when the receiver is gone.
        """
        if connected.family != socket.AF_UNIX:
            raise UsageError("memory is shared over a Unix socket only", remedy='use "unix:PATH", or SocketPageSender')
        connection = FrameConnection(connected, timeout_seconds=timeout_seconds)
        table = {
            "num_pages": region.pools.num_pages,
            "layers": [str(layer) for layer in geometry_of(region.pools).layers],
        }
        try:
            connection.send(FrameKind.REGION, json.dumps(table).encode(), file_descriptor=region.file_descriptor)
        except BaseException:
            connection.close()
            raise
        self._offers = OfferConnection(connection, None)

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
        """See PageSender. A receiver that is reading finds the connection closed afterwards, and drops what it read."""
        self._offers.close()


class SharedMemoryPageReceiver:
    """The receiver's end (page_transport.PageReceiver)."""

    def __init__(self, connected: socket.socket, *, timeout_seconds: float = 60.0) -> None:
        """`connected`: a Unix stream socket, ours from now on; waits for the sender's region.

        Raises PeerError when it does not come, HandOverError when it is not one.
        """
        connection = FrameConnection(connected, timeout_seconds=timeout_seconds)
        try:
            frame, descriptor = connection.receive_with_descriptor()
            try:
                self._region = _mapped(frame, descriptor)
            finally:
                # A mapping outlives the descriptor that it was made from.
                os.close(descriptor)
        except BaseException:
            connection.close()
            raise
        self._inbox = OfferInbox(connection)

    def poll(self) -> list[Offer | Cancelled]:
        """See PageReceiver."""
        return self._inbox.poll()

    def fetch(self, hand_over: HandOver, pools: KvPools, pages: list[int]) -> None:
        """See PageReceiver. Tags are compared before and after: a sender that gave a page away meanwhile is found."""
        source = self._region.pools
        require_offered_tags(hand_over, self._tag_of, source.num_pages, "before")
        convert_pools(source, [held.page for held in hand_over.pages], pools, pages, hand_over.num_tokens)
        if not self._inbox.is_alive():
            raise PeerError(f"the prefill stage ended while hand-over {hand_over.number} was read")
        require_offered_tags(hand_over, self._tag_of, source.num_pages, "after")

    def take(self, number: int) -> None:
        """See PageReceiver."""
        self._inbox.take(number)

    def refuse(self, number: int, reason: str) -> None:
        """See PageReceiver."""
        self._inbox.refuse(number, reason)

    def close(self) -> None:
        """See PageReceiver."""
        self._inbox.close()

    def _tag_of(self, page: int) -> int:
        return int(self._region.tags[page])


def _mapped(frame: Frame, descriptor: int) -> SharedRegion:
    if frame.kind is not FrameKind.REGION:
        raise HandOverError(f"the first frame is {frame.kind.name}, not REGION", remedy="share memory at both ends")
    try:
        table = _Region.model_validate(parse_json_object(bytes(frame.body), "the shared region", HandOverError))
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_input=False)[0]
        raise HandOverError(f"the shared region: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return open_shared_region(descriptor, KvGeometry(tuple(map(parse_layer, table.layers))), table.num_pages)
