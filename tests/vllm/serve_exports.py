"""Stage 2 of `make test-vllm`, in vLLM's environment: vLLM serves the exports and must agree with transformers.

vLLM computes in BF16 and transformers in float32, so nearly all logprobs agree within TOLERANCE: not all, since BF16
noise sends a token whose experts are nearly tied to another expert. A greedy token may differ only where the two best
tokens of the reference are near. The same comparison must fail for damaged weights.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from exports import DAMAGED, REFERENCE, Case, read_case, read_logprobs

if TYPE_CHECKING:
    from vllm import LLM

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TOLERANCE = 0.05  # nats
MIN_SHARE = 0.97  # of logprobs within TOLERANCE
NEAR_TIE = 2 * TOLERANCE  # nats
NUM_TOP = 5
MAX_MODEL_LENGTH = 256


class Observed(NamedTuple):
    """What vLLM said for one prompt: {token: logprob} after each prompt token but the last and after each of
    `tokens[:-1]`, and the greedy `tokens`."""

    after_prompt: list[dict[int, float]]
    after_tokens: list[dict[int, float]]
    tokens: list[int]


class Comparison(NamedTuple):
    """`differences`: of logprobs, in nats. `excused`: greedy tokens that differ in a near tie."""

    differences: npt.NDArray[np.float64]
    num_same_tokens: int
    excused: int
    wrong_tokens: list[str]

    @property
    def share(self) -> float:
        return float((self.differences <= TOLERANCE).mean())

    @property
    def passes(self) -> bool:
        return self.share >= MIN_SHARE and not self.wrong_tokens


def _plain(entry: dict[int, Any]) -> dict[int, float]:
    return {token: value.logprob for token, value in entry.items()}


def open_engine(folder: Path, case: Case) -> LLM:
    """vLLM's engine on a checkpoint; the KV cache's type is left to vLLM ("auto")."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LENGTH,
        max_num_seqs=len(case.prompt_lengths),
        block_size=case.block_size,
    )


def serve(engine: LLM, case: Case) -> list[Observed]:
    from vllm import SamplingParams

    new = len(case.sequences[0]) - case.prompt_lengths[0]
    sampling = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP, detokenize=False
    )
    prompts = [
        {"prompt_token_ids": tokens[:length]}
        for tokens, length in zip(case.sequences, case.prompt_lengths, strict=True)
    ]
    answers = engine.generate(prompts, sampling, use_tqdm=False)
    return [
        Observed(
            [_plain(entry) for entry in answer.prompt_logprobs or [] if entry],
            [_plain(entry) for entry in answer.outputs[0].logprobs],
            list(answer.outputs[0].token_ids),
        )
        for answer in answers
    ]


def compare(case: Case, observed: list[Observed], reference: list[npt.NDArray[np.float32]]) -> Comparison:
    """Logprobs at every position up to the first greedy token that differs, and the greedy tokens themselves."""
    differences: list[float] = []
    num_same, excused = 0, 0
    wrong: list[str] = []
    for number, (seen, expected) in enumerate(zip(observed, reference, strict=True)):
        length = case.prompt_lengths[number]
        rows = dict(enumerate(seen.after_prompt))
        for step, token in enumerate(seen.tokens):
            rows[length - 1 + step] = seen.after_tokens[step]
            best = expected[length - 1 + step]
            wanted = int(best.argmax())
            if token == wanted:
                num_same += 1
                continue
            margin = float(best[wanted] - best[token])
            if margin > NEAR_TIE:
                wrong.append(f"prompt {number} token {step}: {token}, not {wanted} (by {margin:.3f} nats)")
            else:
                excused += 1
            break
        for position, row in rows.items():
            differences += [abs(logprob - float(expected[position, token])) for token, logprob in row.items()]
    return Comparison(np.array(differences), num_same, excused, wrong)


def check(folder: Path) -> bool:
    """Serve and compare one case; print one line a finding."""
    case = read_case(folder)
    observed = serve(open_engine(folder / "export", case), case)
    result = compare(case, observed, read_logprobs(folder / REFERENCE))
    control = compare(case, observed, read_logprobs(folder / DAMAGED))
    for line in result.wrong_tokens:
        print(f"FAIL {case.name}: {line}")
    first_tokens = sum(
        seen.tokens[0] == tokens[length]
        for seen, tokens, length in zip(observed, case.sequences, case.prompt_lengths, strict=True)
    )
    passes = result.passes and not control.passes and first_tokens == len(observed)
    print(
        f"{'PASS' if passes else 'FAIL'} {case.name}: first tokens {first_tokens} of {len(observed)} equal, greedy "
        f"tokens {result.num_same_tokens} equal, {result.excused} near ties; {result.share:.1%} of "
        f"{result.differences.size} logprobs within {TOLERANCE} nats, at least {MIN_SHARE:.0%} wanted "
        f"(damaged experts: {control.share:.1%}); median difference {np.median(result.differences):.4f}, largest "
        f"{result.differences.max():.3f}; made by {case.versions}"
    )
    return passes


def main() -> None:
    names = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
    print("served by " + ", ".join(f"{name} {version(name)}" for name in names))
    sys.exit(0 if check(Path(sys.argv[1])) else 1)


if __name__ == "__main__":
    main()
