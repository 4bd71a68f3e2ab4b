"""`memopt.Engine`: prompts in, text out, from a release that was verified to the last byte.

>>> with memopt.Engine("GLM-5.2-INT4", policy="trust.json", kv_cache="fp8_e4m3") as engine:
...     print(engine.generate(["def main("], SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from memopt.errors import UsageError
from memopt.manifests.keys import PublicKey
from memopt.manifests.policy import TrustPolicy
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import DtypeChoice, EngineOptions
from memopt.runtime.engine.events import Completion, FinishReason, TokenEvent
from memopt.runtime.engine.leader_commands import Abortion, Command, Submission, exchange
from memopt.runtime.engine.metrics import EngineMetrics
from memopt.runtime.engine.new_core import new_core
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.verified_model import load_verified
from memopt.runtime.parallel.communicator import Communicator
from memopt.runtime.parallel.launch import communicator_from_environment
from memopt.runtime.weights.load_options import WeightChoice

# A text, token ids, or the messages of a conversation ({"role": ..., "content": ...}).
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class _Answer:
    """What came of a request so far."""

    num_prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None


class Engine:
    """One thread uses it. Under torchrun every rank makes the same calls with the same arguments."""

    def __init__(
        self,
        release: str | Path,
        *,
        policy: TrustPolicy | str | Path | None = None,
        key: PublicKey | str | Path | bytes | None = None,
        weights: WeightChoice = "released",
        kv_cache: str = "bf16",
        integrity: str = "noop",
        tensor_parallel: int = 1,
        dtype: DtypeChoice = "auto",
        num_pages: int | None = None,
        kv_cache_gib: float | None = None,
        max_requests: int = 16,
        max_step_tokens: int = 512,
        max_tokens: int | None = None,
        prefix_cache: bool = False,
        speculative: bool = False,
        device: str = "cpu",
        communicator: Communicator | None = None,
    ) -> None:
        """Verify and load the release in folder `release`, which exactly one of `policy` and `key` must accept.

        `weights`: "released", or "bf16" to dequantize while loading. `kv_cache`: bf16, fp8_e4m3 or fp8_ds_mla (or fp32,
        the CPU's reference). `integrity`: noop, or tagged to abort a request whose page is no longer its own. `dtype`:
        "float32" (CPU) makes an answer independent of what else runs, to the bit; "auto" is bfloat16. `num_pages` of 64
        tokens or `kv_cache_gib` size the cache (engine/cache_size.py says what neither gives). `max_requests` run at
        once, `max_step_tokens` rows are computed in a step, `max_tokens` is the longest prompt with its answer (the
        model's own limit unless given). `prefix_cache` reuses the pages of equal beginnings, within a tenant.
        `speculative` guesses with the MTP layer. `communicator`: of `tensor_parallel` ranks, torchrun's unless given.

        Raises what `open_release` and loading raise for a release that is not the one that was signed, UsageError,
        CapacityError and UnsupportedError for options that it cannot meet; then there is no engine and nothing stays
        open.
        """
        options = EngineOptions(
            weights, kv_cache, integrity, tensor_parallel, dtype, num_pages, kv_cache_gib, max_requests,
            max_step_tokens, max_tokens, prefix_cache, speculative, device,
        )  # fmt: skip
        if communicator is None:
            communicator = communicator_from_environment(tensor_parallel, device)
        if communicator.num_ranks != tensor_parallel:
            raise UsageError(f"tensor_parallel is {tensor_parallel}, but the communicator has {communicator.num_ranks}")
        model = load_verified(release, policy, key, options, communicator)
        self._communicator = communicator
        self._tokenizer = model.tokenizer
        self._no_tokenizer = model.no_tokenizer
        try:
            self._core: EngineCore | None = new_core(model, options, communicator)
        except BaseException:
            self.close()
            raise
        self._commands: list[Command] = []
        self._answers: dict[int, _Answer] = {}
        self._undelivered: deque[TokenEvent] = deque()
        self._num_submitted = 0

    @property
    def core(self) -> EngineCore:
        """Requests and pages, for whoever looks closer. UsageError after `close`."""
        if self._core is None:
            raise UsageError("the engine is closed", remedy="make a new one")
        return self._core

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._answers or self._undelivered)

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, tenant: str = "") -> int:
        """Queue a request and return its number; its tokens come from `step`.

        `params`: greedy unless given. `tenant`: requests of different tenants share no pages. UsageError for a prompt
        that cannot be read, CapacityError for one that this engine could never finish.
        """
        params = params or SamplingParams()
        tokens = self._tokens_of(prompt)
        self.core.require_room(tokens, params)
        if params.stop and self._tokenizer is None:
            raise self._no_text()
        request_id = self._num_submitted
        self._num_submitted += 1
        self._commands.append(Submission(tuple(tokens), params, tenant))
        self._answers[request_id] = _Answer(len(tokens))
        return request_id

    def step(self) -> list[TokenEvent]:
        """One step of all running requests: the tokens that came, and the requests that ended."""
        if any(answer.finish_reason is None for answer in self._answers.values()):
            self._undelivered += self._step()
        events = list(self._undelivered)
        self._undelivered.clear()
        for event in events:
            if event.finish_reason is not None:
                del self._answers[event.request_id]
        return events

    def abort(self, request_id: int) -> None:
        """End a request before the next step, which tells of it; one that has ended already stays as it is."""
        if request_id in self._answers:
            self._commands.append(Abortion(request_id))

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """All answers, in the order of the prompts. What becomes of other requests meanwhile, the next `step` tells."""
        answers: dict[int, _Answer] = {}
        try:
            for prompt in prompts:
                request_id = self.submit(prompt, params)
                answers[request_id] = self._answers[request_id]
            while any(answer.finish_reason is None for answer in answers.values()):
                self._step_for(set(answers))
        except BaseException:
            self._abandon(answers)
            raise
        for request_id in answers:
            del self._answers[request_id]
        return [_completion(request_id, answer) for request_id, answer in answers.items()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text piece by piece, as it comes; the request is submitted at once, aborted when you stop."""
        request_id = self.submit(prompt, params)
        return self._pieces(request_id, self._answers[request_id])

    def metrics(self) -> EngineMetrics:
        """Capacity, performance, integrity, reuse and speculation since the engine was made."""
        return self.core.metrics()

    def close(self) -> None:
        """Give up model and cache; a second call does nothing."""
        self._core = None
        if self._tokenizer is not None:
            self._tokenizer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pieces(self, request_id: int, answer: _Answer) -> Iterator[str]:
        try:
            while answer.finish_reason is None:
                for event in self._step_for({request_id}):
                    if event.text:
                        yield event.text
        finally:
            self._abandon({request_id: answer})

    def _abandon(self, answers: Mapping[int, _Answer]) -> None:
        """Nobody waits for these any more: end those that run, and tell nobody."""
        for request_id, answer in answers.items():
            if answer.finish_reason is None:
                self.abort(request_id)
            self._answers.pop(request_id, None)

    def _step_for(self, request_ids: set[int]) -> list[TokenEvent]:
        """One step; the events of these requests, those of others are kept for `step`."""
        mine: list[TokenEvent] = []
        for event in self._step():
            (mine if event.request_id in request_ids else self._undelivered).append(event)
        return mine

    def _step(self) -> list[TokenEvent]:
        """Apply what rank 0 was asked, compute one step, and note what came of it."""
        core = self.core
        commands = exchange(self._commands, self._communicator)
        self._commands.clear()
        events = []
        for command in commands:
            if isinstance(command, Submission):
                text = None if self._tokenizer is None else self._tokenizer.answer_text(command.params.stop)
                core.enqueue(command.prompt, command.params, tenant=command.tenant, text=text)
            elif (event := core.abort(command.request_id)) is not None:
                events.append(event)
        events += core.step()
        return [event for event in events if self._note(event)]

    def _note(self, event: TokenEvent) -> bool:
        """Whether anybody waits for the event's request."""
        answer = self._answers.get(event.request_id)
        if answer is None:
            return False
        if event.token_id is not None:
            answer.token_ids.append(event.token_id)
        answer.text += event.text
        answer.finish_reason = event.finish_reason
        return True

    def _tokens_of(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise self._no_text()
            return self._tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            if self._tokenizer is None:
                raise self._no_text()
            return self._tokenizer.encode_chat(cast(Sequence[Mapping[str, Any]], prompt))
        try:
            return [index(cast(int, token)) for token in prompt]
        except TypeError:
            raise UsageError(
                f"a prompt of {type(prompt[0]).__name__} values", remedy="pass a text, token ids, or messages"
            ) from None

    def _no_text(self) -> UsageError:
        return UsageError(f"this release has no text: {self._no_tokenizer}", remedy="pass prompts as token ids")


def _completion(request_id: int, answer: _Answer) -> Completion:
    reason = answer.finish_reason or "abort"
    return Completion(request_id, tuple(answer.token_ids), answer.text, reason, answer.num_prompt_tokens)
