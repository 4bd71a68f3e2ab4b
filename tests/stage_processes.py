"""One of two stages in a process of its own, around a model without weights."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from hand_over_cases import MODEL, mla_pools, pooled_core
from stage_pairs import greedy, prompt_of

from memopt.kernels.kv_formats import KV_FORMATS
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.stages.decode_stage import DecodeStage
from memopt.runtime.stages.frame_connection import FrameConnection
from memopt.runtime.stages.offer_inbox import OfferInbox
from memopt.runtime.stages.page_transport import PageReceiver, PageSender
from memopt.runtime.stages.page_transport_shared_memory import SharedMemoryPageReceiver, SharedMemoryPageSender
from memopt.runtime.stages.page_transport_socket import SocketPageReceiver, SocketPageSender
from memopt.runtime.stages.prefill_stage import PrefillStage
from memopt.runtime.stages.shared_region import new_shared_region

# One import of torch for all children of a test process. (The server may not know the path of tests' own modules.)
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", PrefillStage.__module__, new_shared_region.__module__])
Requests = list[tuple[str, int, int]]


@contextmanager
def child(target: Any, *arguments: Any) -> Iterator[Any]:
    """A process that runs `target`, killed at the end if it still runs."""
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def new_prefill(kind: str, connected: socket.socket, num_pages: int) -> PrefillStage:
    """A prefill stage whose transport is of that kind, "socket" or "shared_memory"."""
    pools = mla_pools(num_pages)
    sender: PageSender
    if kind == "shared_memory":
        region = new_shared_region(pools)
        pools, tracker = region.pools, TaggedTracker(num_pages, "cpu", tags=region.tags)
        sender = SharedMemoryPageSender(connected, region)
    else:
        tracker = TaggedTracker(num_pages, "cpu")
        sender = SocketPageSender(connected, pools, tracker)
    return PrefillStage(pooled_core(pools, tracker, max_tokens=4096), MODEL, sender)


def new_decode(kind: str, connected: socket.socket, num_pages: int, format_name: str) -> DecodeStage:
    """The decode stage at the other end."""
    pools = mla_pools(num_pages, KV_FORMATS[format_name])
    receiver: PageReceiver
    receiver = SharedMemoryPageReceiver(connected) if kind == "shared_memory" else SocketPageReceiver(connected)
    core = pooled_core(pools, TaggedTracker(num_pages, "cpu"), max_tokens=4096)
    return DecodeStage(core, MODEL, receiver)


def run_prefill(kind: str, connected: socket.socket, num_pages: int, requests: Requests) -> None:
    """A whole prefill stage: ends when every request has its answer."""
    stage = new_prefill(kind, connected, num_pages)
    for name, length, max_tokens in requests:
        stage.submit(name, prompt_of(length), greedy(max_tokens))
    while stage.has_work:
        stage.step()
        time.sleep(0.001)
    stage.close()


def run_decode(kind: str, connected: socket.socket, num_pages: int, format_name: str, results: Connection) -> None:
    """A whole decode stage: ends when the sender is gone and every request is done; sends (name, token) pairs."""
    stage = new_decode(kind, connected, num_pages, format_name)
    while stage.has_work or not stage.is_sender_gone:
        for event in stage.step():
            results.send((event.request_id, event.token_id))
        time.sleep(0.001)
    results.close()


def pull_and_stop(kind: str, connected: socket.socket, is_pulled: Connection) -> None:
    """A decode stage that takes an offer, begins to read, and then does nothing any more."""
    if kind == "shared_memory":
        receiver = SharedMemoryPageReceiver(connected)
        while not receiver.poll():
            time.sleep(0.001)
    else:
        inbox = OfferInbox(FrameConnection(connected))
        while not inbox.poll():
            time.sleep(0.001)
        inbox.pull_pages(1)
    is_pulled.send(True)
    time.sleep(600)


def pipe() -> tuple[Connection, Connection]:
    """Where the test reads, and where the child writes."""
    return _CONTEXT.Pipe(duplex=False)
