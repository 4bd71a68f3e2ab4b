"""One system that decodes, in a process of its own: a line of JSON in, a line of JSON out (benchmarks/decode_cpu.py).

    python decode_server.py memopt|transformers|vllm MODEL_FOLDER DTYPE THREADS [PUBLIC_KEY]

A line {"batch": 16, "num_tokens": 64} decodes that many prompts of PROMPT_TOKENS random tokens greedily. The answer has
the seconds of the decode steps alone (from the first token to the last), by the clock and of processor time, the
tokens, and the process's peak memory.
This file imports memopt, transformers or vLLM only when it is that system, so that memory and environment are its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

PROMPT_TOKENS = 32
MAX_BATCH = 16
MAX_TOKENS = 512


@dataclass(frozen=True)
class Seconds:
    """A time by the clock and of the processor, which other processes lengthen less; made without arguments, now."""

    wall: float = field(default_factory=time.perf_counter)
    processor: float = field(default_factory=time.process_time)

    def passed(self) -> Seconds:
        """What has passed until now, of all threads."""
        return Seconds(time.perf_counter() - self.wall, time.process_time() - self.processor)


# What a decode run gives: seconds from the first token to the last, and the tokens of each prompt.
Run = tuple[Seconds, list[list[int]]]


def prompts_of(batch: int, vocab_size: int) -> list[list[int]]:
    """The same for every system; token 0 may be special and is left out."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocab_size, (batch, PROMPT_TOKENS), generator=generator).tolist()


def peak_bytes() -> int:
    """The most memory that this process held."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].removesuffix("kB")) * 1024


def memopt_system(folder: str, dtype: str, key: str) -> Callable[[list[list[int]], int], Run]:
    """The release itself, through the engine."""
    from memopt.runtime.engine.engine import Engine
    from memopt.runtime.engine.sampling_params import SamplingParams

    engine = Engine(folder, key=key, dtype=dtype, num_pages=200, max_requests=MAX_BATCH, max_step_tokens=1024)  # type: ignore[arg-type]

    def run(prompts: list[list[int]], num_tokens: int) -> Run:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        tokens: dict[int, list[int]] = {engine.submit(prompt, params): [] for prompt in prompts}
        started: Seconds | None = None
        while engine.has_work:
            for event in engine.step():
                if event.token_id is not None:
                    tokens[event.request_id].append(event.token_id)
            # All prompts fit one step: the first tokens come together.
            started = started or Seconds()
        return (started or Seconds()).passed(), list(tokens.values())

    return run


def transformers_system(folder: str, dtype: str) -> Callable[[list[list[int]], int], Run]:
    """The dequantized export, in the plain loop that is transformers' fastest: no generate() around the model."""
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def run(prompts: list[list[int]], num_tokens: int) -> Run:
        cache = DynamicCache(config=model.config)
        logits = model(torch.tensor(prompts), past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        columns = [logits[:, -1].argmax(dim=-1)]
        columns[0].tolist()
        started = Seconds()
        for _ in range(num_tokens - 1):
            step = columns[-1][:, None]
            logits = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            columns.append(logits[:, -1].argmax(dim=-1))
            # As an engine does, which gives out each token.
            columns[-1].tolist()
        return started.passed(), torch.stack(columns, dim=1).tolist()

    return run


def vllm_system(folder: str, dtype: str, num_threads: int) -> Callable[[list[list[int]], int], Run]:
    """The dequantized export in vLLM's CPU build, which else takes all cores."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{num_threads - 1}" if num_threads > 1 else "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams

    length = PROMPT_TOKENS + MAX_TOKENS
    engine = LLM(
        model=folder, dtype=dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=length,
        max_num_seqs=MAX_BATCH, enable_prefix_caching=False,
    )  # fmt: skip

    def timed(prompts: list[list[int]], num_tokens: int) -> Run:
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        started = Seconds()
        answers = engine.generate(asked, sampling, use_tqdm=False)
        return started.passed(), [list(answer.outputs[0].token_ids) for answer in answers]

    def run(prompts: list[list[int]], num_tokens: int) -> Run:
        first, _ = timed(prompts, 1)
        all_, tokens = timed(prompts, num_tokens)
        return Seconds(all_.wall - first.wall, all_.processor - first.processor), tokens

    return run


def main() -> None:
    """Serve lines until standard input ends."""
    name, folder, dtype, num_threads, *rest = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    # Whatever a library prints goes to standard error.
    os.dup2(2, 1)
    torch.set_num_threads(int(num_threads))
    started = time.perf_counter()
    try:
        if name == "memopt":
            run = memopt_system(folder, dtype, *rest)
        elif name == "transformers":
            run = transformers_system(folder, dtype)
        else:
            run = vllm_system(folder, dtype, int(num_threads))
    except ImportError as problem:
        print(json.dumps({"missing": str(problem)}), file=answers, flush=True)
        return
    loaded: dict[str, Any] = {"load_seconds": time.perf_counter() - started, "loaded_bytes": peak_bytes()}
    print(json.dumps(loaded), file=answers, flush=True)
    vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    for line in sys.stdin:
        asked = json.loads(line)
        seconds, tokens = run(prompts_of(asked["batch"], vocab_size), asked["num_tokens"])
        answer = {
            "seconds": seconds.wall,
            "processor_seconds": seconds.processor,
            "tokens": tokens,
            "peak_bytes": peak_bytes(),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
