"""The three transports between two sets of pools of one process, for tests."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hand_over_cases import fill_pools

from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.stages.page_transport import PageReceiver, PageSender
from memopt.runtime.stages.page_transport_local import local_transport
from memopt.runtime.stages.page_transport_shared_memory import SharedMemoryPageReceiver, SharedMemoryPageSender
from memopt.runtime.stages.page_transport_socket import SocketPageReceiver, SocketPageSender
from memopt.runtime.stages.shared_region import new_shared_region

TRANSPORTS = ("local", "socket", "tcp", "shared_memory")
WAIT_SECONDS = 10


@dataclass
class Ends:
    """A sender whose pools are filled with random values, and a receiver."""

    pools: KvPools
    tracker: TaggedTracker
    sender: PageSender
    receiver: PageReceiver


def socket_pair(kind: str) -> tuple[socket.socket, socket.socket]:
    """Two connected stream sockets, Unix or TCP."""
    if kind != "tcp":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        return one, other


@contextmanager
def transport(kind: str, pools: KvPools, timeout_seconds: float = 5.0) -> Iterator[Ends]:
    """Both ends of one of TRANSPORTS. `pools`: the sender's, or for shared memory their model."""
    if kind == "shared_memory":
        region = new_shared_region(pools)
        pools, tracker = region.pools, TaggedTracker(pools.num_pages, "cpu", tags=region.tags)
    else:
        tracker = TaggedTracker(pools.num_pages, "cpu")
    fill_pools(pools)
    sender: PageSender
    receiver: PageReceiver
    if kind == "local":
        sender, receiver = local_transport(pools, tracker)
    else:
        one, other = socket_pair(kind)
        if kind == "shared_memory":
            sender = SharedMemoryPageSender(one, region, timeout_seconds=timeout_seconds)
            os.close(region.file_descriptor)
            receiver = SharedMemoryPageReceiver(other, timeout_seconds=timeout_seconds)
        else:
            sender = SocketPageSender(one, pools, tracker, timeout_seconds=timeout_seconds)
            receiver = SocketPageReceiver(other, timeout_seconds=timeout_seconds)
    try:
        yield Ends(pools, tracker, sender, receiver)
    finally:
        sender.close()
        receiver.close()


def wait_for(poll: Callable[[], list[Any]]) -> Any:
    """The first thing that `poll` gives, which must come alone."""
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        if found := poll():
            assert len(found) == 1
            return found[0]
        time.sleep(0.001)
    raise AssertionError(f"nothing came within {WAIT_SECONDS} s")
