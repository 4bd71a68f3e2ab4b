"""`memopt.Engine`: prompts in, text out, from a release that was verified to the last byte.

>>> with memopt.Engine("GLM-5.2-INT4", policy="trust.json", kv_cache="fp8_e4m3") as engine:
...     print(engine.generate(["def main("], SamplingParams(max_tokens=64))[0].text)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from memopt.errors import UsageError
from memopt.manifests.keys import PublicKey
from memopt.manifests.policy import TrustPolicy
from memopt.runtime.engine.answer import Answer
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import DtypeChoice, EngineOptions
from memopt.runtime.engine.events import Completion, TokenEvent
from memopt.runtime.engine.leader_commands import Abortion, Command, Submission, exchange
from memopt.runtime.engine.metrics import EngineMetrics
from memopt.runtime.engine.new_core import new_core
from memopt.runtime.engine.prompt import Prompt, require_prompts, require_tokenizer, token_ids_of
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.verified_model import load_verified
from memopt.runtime.parallel.communicator import Communicator
from memopt.runtime.parallel.launch import communicator_from_environment
from memopt.runtime.weights.load_options import WeightChoice


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
        self._commands: list[Command] = []
        self._answers: dict[int, Answer] = {}
        self._undelivered: deque[TokenEvent] = deque()
        self._num_submitted = 0
        try:
            self._core: EngineCore | None = new_core(model, options, communicator)
        except BaseException:
            self.close()
            raise

    @property
    def core(self) -> EngineCore:
        """Requests and pages, for whoever looks closer. UsageError after `close`."""
        if self._core is None:
            raise UsageError("the engine is closed", remedy="make a new one")
        return self._core

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._undelivered) or self._is_step_due

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, tenant: str = "") -> int:
        """Queue a request and return its number; its tokens come from `step`.

        `params`: greedy unless given. `tenant`: requests of different tenants share no pages. UsageError for a prompt
        that cannot be read, CapacityError for one that this engine could never finish.
        """
        params = params or SamplingParams()
        return self._submit(self._admitted(prompt, params), params, tenant)

    def step(self) -> list[TokenEvent]:
        """One step of all running requests: the tokens that came, and the requests that ended.

        `generate` and `stream` give out their own requests, of which nothing is told here.
        """
        if self._core is None or self._is_step_due:
            self._step()
        events = list(self._undelivered)
        self._undelivered.clear()
        for event in events:
            if event.finish_reason is not None:
                del self._answers[event.request_id]
        return events

    def abort(self, request_id: int) -> None:
        """End a request before the next step, which tells of it; one that has ended already stays as it is."""
        answer = self._answers.get(request_id)
        if answer is not None and not answer.is_finished:
            self._commands.append(Abortion(request_id))

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """All answers, in the order of the prompts. What becomes of other requests meanwhile, the next `step` tells.

        Errors as for `submit`: of prompts of which one is refused, none runs.
        """
        require_prompts(prompts)
        params = params or SamplingParams()
        admitted = [self._admitted(prompt, params) for prompt in prompts]
        request_ids = [self._submit(tokens, params, is_claimed=True) for tokens in admitted]
        try:
            while not all(self._answers[request_id].is_finished for request_id in request_ids):
                self._step()
            return [self._answers[request_id].completion(request_id) for request_id in request_ids]
        finally:
            self._abandon(request_ids)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text piece by piece, as it comes; the request is submitted at once, aborted when you stop."""
        params = params or SamplingParams()
        pieces = self._pieces(self._submit(self._admitted(prompt, params), params, is_claimed=True))
        # Python ends a generator that was never begun without a word: begun here, it aborts its request in any case.
        next(pieces)
        return pieces

    def metrics(self) -> EngineMetrics:
        """Capacity, performance, integrity, reuse and speculation since the engine was made."""
        return self.core.metrics()

    def close(self) -> None:
        """Give up model, cache and all requests; a second call does nothing."""
        self._core = None
        self._commands.clear()
        self._answers.clear()
        self._undelivered.clear()
        if self._tokenizer is not None:
            self._tokenizer.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_step_due(self) -> bool:
        """Whether a request is not finished, or one that nobody waits for is still to be ended."""
        return bool(self._commands) or not all(answer.is_finished for answer in self._answers.values())

    def _admitted(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """A prompt's token ids; UsageError or CapacityError for a request that cannot be run."""
        core = self.core
        tokens = token_ids_of(prompt, self._tokenizer, self._no_tokenizer)
        if params.stop:
            require_tokenizer(self._tokenizer, self._no_tokenizer)
        core.require_room(tokens, params)
        return tokens

    def _submit(
        self, tokens: Sequence[int], params: SamplingParams, tenant: str = "", *, is_claimed: bool = False
    ) -> int:
        request_id = self._num_submitted
        self._num_submitted += 1
        self._commands.append(Submission(tuple(tokens), params, tenant))
        self._answers[request_id] = Answer(len(tokens), time.monotonic(), is_claimed)
        return request_id

    def _pieces(self, request_id: int) -> Iterator[str]:
        """Nothing first, then the pieces; whoever else steps, none is left out."""
        answer = self._answers[request_id]
        num_given = 0
        try:
            yield ""
            while num_given < len(answer.pieces) or not answer.is_finished:
                if num_given == len(answer.pieces):
                    self._step()
                    continue
                num_given += 1
                yield answer.pieces[num_given - 1]
        finally:
            self._abandon([request_id])

    def _abandon(self, request_ids: Sequence[int]) -> None:
        """Nobody waits for these any more: end those that run, and tell nobody."""
        for request_id in request_ids:
            self.abort(request_id)
            self._answers.pop(request_id, None)

    def _step(self) -> None:
        """Apply what rank 0 was asked, compute one step, and note what came of it."""
        core = self.core
        asked, self._commands = self._commands, []
        for command in exchange(asked, self._communicator):
            if isinstance(command, Submission):
                self._enqueue(core, command)
            elif (event := core.abort(command.request_id)) is not None:
                self._note(event)
        for event in core.step():
            self._note(event)

    def _enqueue(self, core: EngineCore, command: Submission) -> None:
        text = None if self._tokenizer is None else self._tokenizer.answer_text(command.params.stop)
        request = core.enqueue(command.prompt, command.params, tenant=command.tenant, text=text)
        answer = self._answers.get(request.request_id)
        if answer is not None:
            request.submitted_seconds = answer.submitted_seconds

    def _note(self, event: TokenEvent) -> None:
        answer = self._answers.get(event.request_id)
        # Nobody waits for one that was abandoned.
        if answer is not None:
            answer.take(event)
            if not answer.is_claimed:
                self._undelivered.append(event)
