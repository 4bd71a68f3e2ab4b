"""A prefill stage and a decode stage of one process around models without weights, and how to run them to the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hand_over_cases import MODEL, mla_pools, pooled_core
from page_transports import transport

from memopt.kernels.kv_formats import BF16, KvFormat
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.stages.decode_stage import DecodeEvent, DecodeStage
from memopt.runtime.stages.prefill_stage import PrefillEvent, PrefillStage


@dataclass
class Stages:
    """Both stages and all that they told."""

    prefill: PrefillStage
    decode: DecodeStage
    prefill_core: EngineCore
    decode_core: EngineCore
    prefill_events: list[PrefillEvent] = field(default_factory=list)
    decode_events: list[DecodeEvent] = field(default_factory=list)

    def step_prefill(self) -> None:
        """One step of the prefill stage; pages are counted."""
        self.prefill_events += self.prefill.step()
        self.prefill_core.pages.check()

    def step_decode(self) -> None:
        """One step of the decode stage; pages are counted, and never more promised than there are."""
        self.decode_events += self.decode.step()
        self.decode_core.pages.check()
        assert self.decode.num_pages_promised <= self.decode_core.pages.num_usable

    def run(self, max_steps: int = 5000) -> None:
        """Step both until nothing is left to do."""
        for _ in range(max_steps):
            if not (self.prefill.has_work or self.decode.has_work):
                return
            self.step_prefill()
            self.step_decode()
        raise AssertionError(f"still working after {max_steps} steps")

    def tokens(self, name: str) -> list[int]:
        """What the decode stage told of a request, the first token included."""
        return [e.token_id for e in self.decode_events if e.request_id == name and e.token_id is not None]

    def reason(self, name: str) -> str | None:
        """Why a request ended in the decode stage; None while it has not."""
        reasons = [event.finish_reason for event in self.decode_events if event.request_id == name]
        assert None in [*reasons[-1:], None]
        return next((reason for reason in reasons if reason is not None), None)

    def states(self, name: str) -> list[str]:
        """The states that the prefill stage told of a request."""
        return [event.state for event in self.prefill_events if event.request_id == name]


@contextmanager
def stages(
    kind: str = "local",
    *,
    kv_format: KvFormat = BF16,
    prefill_pages: int = 40,
    decode_pages: int = 40,
    offer_seconds: float | None = None,
    max_requests: int = 4,
    max_tokens: int = 512,
) -> Iterator[Stages]:
    """Stages over one of page_transports.TRANSPORTS; `kv_format` is the decode stage's."""
    with transport(kind, mla_pools(prefill_pages)) as ends:
        ends.tracker.tags.zero_()
        pools = mla_pools(decode_pages, kv_format)
        prefill_core = pooled_core(ends.pools, ends.tracker)
        decode_core = pooled_core(
            pools, TaggedTracker(decode_pages, "cpu"), max_requests=max_requests, max_tokens=max_tokens
        )
        yield Stages(
            PrefillStage(prefill_core, MODEL, ends.sender, offer_seconds=offer_seconds),
            DecodeStage(decode_core, MODEL, ends.receiver),
            prefill_core,
            decode_core,
        )


def prompt_of(length: int, first: int = 1) -> list[int]:
    """Token ids that differ from place to place."""
    return [(first + 7 * number) % 97 for number in range(length)]


def greedy(max_tokens: int) -> SamplingParams:
    """The likeliest tokens, the model's end among them."""
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def wait_until_offered(pair: Stages, *names: str) -> None:
    """Step the prefill stage until it has offered all of these."""
    while not all("offered" in pair.states(name) for name in names):
        pair.step_prefill()


def wait_until_taken(pair: Stages, *names: str) -> None:
    """Step both stages until the decode stage has taken all of these."""
    end = time.monotonic() + 10
    while not all("taken" in pair.states(name) for name in names):
        assert time.monotonic() < end
        pair.step_prefill()
        pair.step_decode()
