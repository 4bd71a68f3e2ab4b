"""What page tags cost a decode step on the CPU: `python benchmarks/page_tags_overhead.py`. About a minute.

Two engines around one model, the trained example's signed INT4 release, with integrity noop (A) and tagged (B), decode
the same requests in lockstep on one thread: A B B A, a step each, so that both see the same lengths, caches and
neighbours. A block is some such fours in a row. The figure is the median step time of B over that of A; its 95 %
interval comes from resampling whole blocks. Wanted: the upper bound below 1 %. Beside it stands the median over the
fours, which busy neighbours disturb less.

Times are this thread's processor time (other programs do not count, though their use of the caches does). Behind them
stand host microseconds a step and launches a step. On the CPU the host knows at once that nobody is flagged. On a GPU
it does not: each step then masks what flagged requests would read and write, and copies the flags. An engine that is
told nothing either counts those launches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.kernels.layout import PAGE_TOKENS
from memopt.manifests.keys import generate_private_key
from memopt.manifests.signer import KeySigner
from memopt.runtime.engine import model_runner
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.new_core import new_core
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.engine.verified_model import VerifiedModel, load_verified
from memopt.runtime.integrity.tagged_tracker import TaggedTracker
from memopt.runtime.parallel.communicator import SingleRank

SOURCE = Path(__file__).parent.parent / "examples" / "tiny-glm5-fp8"
BATCHES = (1, 16)
# The sequence of a request grows from the prompt's length by as much as one page every 64 steps.
PROMPT_TOKENS, ANSWER_TOKENS, WARM_STEPS = 96, 400, 4
QUADS_A_BLOCK = 4
NUM_RESAMPLES = 4000
WANTED_UPPER_BOUND = 0.01
MICRO = 1e6


@dataclass(frozen=True, slots=True)
class Estimate:
    """An overhead, as a share, and its bootstrap 95 % interval."""

    overhead: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.overhead:+7.2%} ({self.low:+.2%} to {self.high:+.2%})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Step seconds [blocks, steps] of two engines, block by block beside each other."""

    first: np.ndarray
    second: np.ndarray

    def ratio_of_medians(self) -> Estimate:
        """Median of the second's steps over median of the first's."""
        return self._estimate(lambda drawn: np.median(self.second[drawn]) / np.median(self.first[drawn]))

    def median_of_pairs(self) -> Estimate:
        """Median over ABBA fours of (B + B) / (A + A): neighbours in time, so that slow changes cancel."""
        pairs = [steps.reshape(len(steps), -1, 2).sum(axis=2) for steps in (self.first, self.second)]
        ratios = pairs[1] / pairs[0]
        return self._estimate(lambda drawn: np.median(ratios[drawn]))

    def _estimate(self, statistic: Callable[[np.ndarray], np.floating]) -> Estimate:
        """Blocks are drawn again and again, with both engines' steps in them."""
        generator = np.random.default_rng(0)
        num_blocks = len(self.first)
        drawn = [statistic(generator.integers(0, num_blocks, num_blocks)) for _ in range(NUM_RESAMPLES)]
        low, high = np.percentile(drawn, (2.5, 97.5))
        return Estimate(float(statistic(np.arange(num_blocks))) - 1, float(low) - 1, float(high) - 1)


class Decoding:
    """An engine that decodes `batch` requests for ever: it starts them anew when they end."""

    def __init__(self, engine: EngineCore, batch: int) -> None:
        self.engine = engine
        self._batch = batch
        self._num_left = 0

    def step_seconds(self) -> float:
        """One decode step of the whole batch, in processor time."""
        if self._num_left == 0:
            self._start()
        self._num_left -= 1
        start = time.thread_time()
        self.engine.step()
        return time.thread_time() - start

    def _start(self) -> None:
        while self.engine.has_work:
            self.engine.step()
        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        for number in range(self._batch):
            self.engine.submit([3 + (number * 31 + position) % 2000 for position in range(PROMPT_TOKENS)], params)
        scheduler = self.engine.scheduler
        while scheduler.waiting or not all(request.is_decoding for request in scheduler.running):
            self.engine.step()
        for _ in range(WARM_STEPS):
            self.engine.step()
        self._num_left = ANSWER_TOKENS // 2


def signed_release(folder: Path) -> tuple[Path, Path]:
    """The trained example as a signed INT4 release, and its public key."""
    release, key = folder / "release", folder / "release.pub"
    memopt.compress(SOURCE, release, recipe="glm-5.2-int4", workers=1, device="cpu")
    private = generate_private_key()
    memopt.sign_release(release, [KeySigner(private)], memopt.SignOptions("benchmark"))
    key.write_bytes(private.public_key.pem)
    return release, key


class UnawareTracker(TaggedTracker):
    """Never tells the host how a check ended: an engine then does on the CPU what it does on a GPU."""

    is_known_clean = False


def new_engine(model: VerifiedModel, integrity: str, *, is_unaware: bool = False) -> EngineCore:
    """An engine whose cache is never short."""
    pages = max(BATCHES) * (-(-(PROMPT_TOKENS + ANSWER_TOKENS) // PAGE_TOKENS) + 1) + 1
    options = EngineOptions(
        integrity=integrity, num_pages=pages, max_requests=max(BATCHES), max_tokens=PROMPT_TOKENS + ANSWER_TOKENS
    )
    place = (lambda pools: (pools, UnawareTracker(pools.num_pages, "cpu"))) if is_unaware else None
    return new_core(model, options, SingleRank(), place=place)


def compare(first: EngineCore, second: EngineCore, batch: int, num_blocks: int) -> Comparison:
    """Step times of two engines in ABBA order."""
    a, b = Decoding(first, batch), Decoding(second, batch)
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    for _ in range(num_blocks):
        block: tuple[list[float], list[float]] = ([], [])
        for which in (0, 1, 1, 0) * QUADS_A_BLOCK:
            block[which].append((a, b)[which].step_seconds())
        times[0].append(block[0])
        times[1].append(block[1])
    return Comparison(np.array(times[0]), np.array(times[1]))


class LaunchCount(TorchDispatchMode):
    """Counts operators that compute something: what would be launches on a GPU. Views and allocations are none."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not func.is_view and not name.startswith(("aten.empty", "aten.detach", "aten._local_scalar", "aten.lift")):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def launches_a_step(engine: EngineCore, batch: int, num_steps: int = 8) -> float:
    """Operators of a decode step, the tag check's own (one) not among them."""
    decoding = Decoding(engine, batch)
    decoding.step_seconds()
    counting = LaunchCount()
    with counting:
        for _ in range(num_steps):
            decoding.step_seconds()
    return sum(counting.names.values()) / num_steps


@contextmanager
def timed(owner: Any, name: str, seconds: list[float]) -> Iterator[None]:
    """Adds the processor time of each call of a function of a module, or method of an object, to `seconds`."""
    function: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            seconds.append(time.thread_time() - start)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


def host_microseconds(engine: EngineCore, batch: int, num_steps: int = 128) -> tuple[float, float]:
    """Microseconds a step: to build its rows, the check among it (median), and in new tags (mean)."""
    decoding = Decoding(engine, batch)
    decoding.step_seconds()
    built: list[float] = []
    tags: list[float] = []
    with timed(model_runner, "build_step", built), timed(engine.pages.tracker, "on_allocate", tags):
        for _ in range(num_steps):
            decoding.step_seconds()
    return statistics.median(built) * MICRO, sum(tags) / num_steps * MICRO


def report(name: str, found: Comparison) -> bool:
    """One line; whether the upper bound is below the bar."""
    medians = found.ratio_of_medians()
    times = " / ".join(f"{np.median(steps) * 1e3:.3f}" for steps in (found.first, found.second))
    print(f"{name:<27} {times:>17}  {medians!s:<28} {found.median_of_pairs()}", flush=True)
    return medians.high < WANTED_UPPER_BOUND


def main() -> None:
    """Print overhead with its interval, host microseconds and launches."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--blocks", type=int, default=60, help=f"blocks of {QUADS_A_BLOCK} ABBA fours (default 60)")
    options.add_argument("--noise", action="store_true", help="compare two noop engines too: what that shows is noise")
    options.add_argument("--batch", type=int, nargs="*", default=BATCHES)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        release, key = signed_release(Path(name))
        model = load_verified(release, None, key, EngineOptions(), SingleRank())
    noop, other_noop, tagged = (new_engine(model, integrity) for integrity in ("noop", "noop", "tagged"))
    unaware = new_engine(model, "tagged", is_unaware=True)
    print(f"{chosen.blocks} blocks of {4 * QUADS_A_BLOCK} steps, one thread, tiny-glm5 INT4, BF16 KV")
    print(f"{'':<27} {'median ms a step':>17}  {'ratio of medians - 1':<28} median of ABBA pairs - 1")
    passes = []
    for batch in chosen.batch:
        if chosen.noise:
            report(f"batch {batch:>2}: noop and noop", compare(noop, other_noop, batch, chosen.blocks))
        passes.append(report(f"batch {batch:>2}: noop and tagged", compare(noop, tagged, batch, chosen.blocks)))
    verdict = "PASS" if all(passes) else "FAIL"
    print(f"upper bound below {WANTED_UPPER_BOUND:.0%}: {verdict}\n")
    for batch in chosen.batch:
        (plain_us, _), (tagged_us, tags_us) = (host_microseconds(engine, batch) for engine in (noop, tagged))
        plain, on_cpu, on_gpu = (launches_a_step(engine, batch) for engine in (noop, tagged, unaware))
        # The check itself is no torch operator.
        print(
            f"batch {batch:>2}: host {tagged_us - plain_us:+.1f} us a step for the check ({plain_us:.0f} us to build a "
            f"step without), {tags_us:.1f} us for new tags; launches a step {plain:.0f} without, {on_cpu + 1:.0f} with "
            f"tags, {on_gpu + 1:.0f} where the host does not know the flags (a GPU)"
        )


if __name__ == "__main__":
    main()
