"""What INT4 costs a real language model: perplexity and KL on text that the model never saw.

    python benchmarks/perplexity.py [--windows N] [--source examples/tiny-glm5-fp8] [--json]

The source is dequantized to BF16 exactly; each release is read back by transformers and computed in float32, so that
only the weights differ. The model was trained on the standard library without `idlelib`, whose source is the text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import memopt
from memopt.compressor.recipe import Int4Format
from memopt.kernels.int4_spec import ScaleSearch

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-glm5-fp8"
RECIPE = "glm-5.2-int4"
HELD_OUT = "idlelib"
# Windows as long as the model was trained on; README.md of the example names these two.
WINDOW_TOKENS = 120
NUM_WINDOWS = 12
BATCH = 12


@dataclass(frozen=True)
class Quality:
    """`perplexity` on the text. KL to the source's predictions, nats a token: mean, its standard error over windows,
    and median. The median tells scale rules apart on few tokens: the mean hangs on the rare token that BF16-sized
    changes send to another expert."""

    name: str
    perplexity: float
    kl: float
    kl_error: float
    kl_median: float


def held_out_text() -> str:
    """The source of `idlelib`, one file after another in the order of their names; an error if Python lacks it."""
    spec = importlib.util.find_spec(HELD_OUT)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"this Python has no {HELD_OUT}, the only text that the example was not trained on")
    folder = Path(spec.submodule_search_locations[0])
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


def token_windows(source: Path, count: int) -> Tensor:
    """`count` windows [count, WINDOW_TOKENS] of the text, evenly spaced."""
    tokens = Tokenizer.from_file(str(source / "tokenizer.json")).encode(held_out_text()).ids
    num_whole = len(tokens) // WINDOW_TOKENS
    if not 1 <= count <= num_whole:
        raise SystemExit(f"{count} windows, but the text has 1 to {num_whole}")
    starts = [index * num_whole // count * WINDOW_TOKENS for index in range(count)]
    return torch.tensor([tokens[start : start + WINDOW_TOKENS] for start in starts])


@torch.no_grad()
def logprobs(folder: Path, windows: Tensor, *, is_release: bool) -> Tensor:
    """float32 [windows, tokens - 1, vocabulary]: what each token but the last makes of the next."""
    quantization = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if is_release else {}
    with warnings.catch_warnings():
        # "The quantization_config from the model will be used", which is the point.
        warnings.filterwarnings("ignore", "You passed `quantization_config`", UserWarning)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **quantization)
    model = model.to(torch.float32).eval()
    parts = [model(part, use_cache=False).logits[:, :-1].log_softmax(-1) for part in windows.split(BATCH)]
    return torch.cat(parts)


def quality(name: str, predicted: Tensor, reference: Tensor, windows: Tensor) -> Quality:
    """Perplexity of `predicted` and its KL from `reference`, both [windows, tokens - 1, vocabulary]."""
    nll = -predicted.gather(-1, windows[:, 1:, None]).double().mean()
    kl = (reference.exp() * (reference - predicted)).sum(-1).double()
    of_window = kl.mean(-1)
    error = float(of_window.std() / math.sqrt(len(of_window))) if len(of_window) > 1 else math.nan
    return Quality(name, math.exp(nll), float(kl.mean()), error, float(kl.median()))


def recipe_with_scale(scale: ScaleSearch) -> memopt.Recipe:
    """The shipped recipe with another scale rule for every INT4 format in it."""
    recipe = memopt.load_recipe(RECIPE)
    rules = tuple(
        rule.model_copy(update={"format": rule.format.model_copy(update={"scale": scale})})
        if isinstance(rule.format, Int4Format)
        else rule
        for rule in recipe.rules
    )
    return recipe.model_copy(update={"rules": rules})


def measure(source: Path, windows: Tensor) -> Iterator[Quality]:
    """The source first, then a release for each scale rule."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        memopt.dequantize(source, Path(scratch, "source"))
        reference = logprobs(Path(scratch, "source"), windows, is_release=False)
        yield quality("source", reference, reference, windows)
        for scale in get_args(ScaleSearch):
            memopt.compress(source, Path(scratch, scale), recipe=recipe_with_scale(scale), device="cpu")
            predicted = logprobs(Path(scratch, scale), windows, is_release=True)
            yield quality(scale, predicted, reference, windows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity and KL of INT4 releases on held-out text.")
    parser.add_argument("--source", type=Path, default=EXAMPLE)
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help=f"of {WINDOW_TOKENS} tokens")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    windows = token_windows(arguments.source, arguments.windows)
    rows = list(measure(arguments.source, windows))
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{arguments.source.name}, {HELD_OUT}, {len(windows)} windows of {WINDOW_TOKENS} tokens, recipe {RECIPE}")
    print(f"{'weights':<12} {'perplexity':>10} {'to source':>10} {'KL, nats a token':>20} {'median':>9}")
    for row in rows:
        ratio = row.perplexity / rows[0].perplexity
        kl = f"{row.kl:>10.5f} ± {row.kl_error:.5f} {row.kl_median:>9.5f}"
        print(f"{row.name:<12} {row.perplexity:>10.3f} {ratio:>10.4f} {kl}")


if __name__ == "__main__":
    main()
