"""The runtime's logits are transformers': every family, prefill in chunks and 64 decode steps, DSA active."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import RowsOf, Steps
from torch import Tensor

import memopt
from differential.reference_weights import read_config, read_tensors
from differential.releases import Releases
from differential.transformers_models import load_model
from differential.transformers_runs import RoundedCache, all_logits, exact_model, lower_position_wins
from memopt.kernels.kv_formats import BF16, FP8_E4M3, FP32, KvFormat
from memopt.runtime.model.config_file import parse_model_config
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.decoder_layer import DecoderLayer
from memopt.runtime.weights.load_model import LoadOptions, load_decoder

NUM_DECODE_STEPS = 64
# Largest difference of logits over the largest logit. Seen: 1.1e-6.
TOLERANCE = 1e-4
# Over a rounded cache, where a value near a border rounds the other way: seen 8e-5 (bf16) and 8e-4 (fp8_e4m3).
ROUNDED_TOLERANCE = 2e-3
# index_topk is 256 in the tiny models: prompts of `long` tokens have the indexer choose.
PROMPTS = {"short": 70, "long": 265}
CASES = {
    "trained": "long",
    "glm-5.1": "long",
    "glm-5.2-mixed": "long",
    "glm-4.7": "short",
    "channel": "short",  # DeepSeek-V3, one INT4 scale a row
    "kimi-k2.6": "short",
}


def load(folder: Path, **options: Any) -> Decoder:
    config = parse_model_config(read_config(folder))
    return load_decoder(config, read_tensors(folder).items(), LoadOptions("float32", **options))


def token_ids(decoder: Decoder, count: int) -> Tensor:
    return torch.randint(0, decoder.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1))


def our_logits(decoder: Decoder, ids: Tensor, num_prompt: int, kv_format: KvFormat) -> Tensor:
    """The prompt in two chunks, whose border is not a page's, then one token a step."""
    steps = Steps(decoder, kv_format, max_tokens=len(ids))
    middle = num_prompt // 2 + 3
    found = [
        steps.logits(RowsOf(0, ids[:middle].tolist(), 0)),
        steps.logits(RowsOf(0, ids[middle:num_prompt].tolist(), middle)),
    ]
    for position in range(num_prompt, len(ids)):
        found.append(steps.logits(RowsOf(0, [int(ids[position])], position, is_prompt=False)))
    return torch.cat(found)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@dataclass
class RecordingLayer:
    """A layer that remembers what it selected."""

    layer: DecoderLayer
    positions: list[Tensor] = field(default_factory=list)

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        x, selection = self.layer(x, *arguments)
        if selection is not None:
            self.positions.append(selection.positions)
        return x, selection


@pytest.mark.parametrize("name", sorted(CASES))
def test_logits_in_float32(name: str, releases: Releases) -> None:
    release = releases.release(name)
    decoder = load(release.folder)
    num_prompt = PROMPTS[CASES[name]]
    ids = token_ids(decoder, num_prompt + NUM_DECODE_STEPS)
    recording = [RecordingLayer(layer) for layer in decoder.layers]
    ours = our_logits(replace(decoder, layers=tuple(recording)), ids, num_prompt, FP32)  # type: ignore[arg-type]
    with lower_position_wins() as record:
        theirs = all_logits(exact_model(release.folder, release.export), ids)
    assert relative(ours, theirs) < TOLERANCE
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    if CASES[name] == "long":
        check_selections(decoder, recording, record.selections)


def check_selections(decoder: Decoder, recording: list[RecordingLayer], theirs: list[Tensor]) -> None:
    """Every row that chose, in every layer, chose what transformers did; "shared" layers repeat the last full one."""
    full = iter(theirs)
    chosen: Tensor | None = None
    for layer, record in enumerate(recording):
        if decoder.config.has_indexer(layer):
            chosen = next(full)
        assert chosen is not None
        ours = torch.cat(record.positions)
        # Steps that saw no more than top_k tokens kept all and recorded nothing.
        expected = chosen[-ours.shape[0] :].sort(dim=1).values
        assert ours.shape[0] > NUM_DECODE_STEPS
        assert torch.equal(ours.sort(dim=1).values, expected), layer
        assert int(expected[-1].min()) >= 0
        assert not torch.equal(expected[-1], torch.arange(expected.shape[1], dtype=torch.int32))
    assert next(full, None) is None


@pytest.mark.parametrize("name", ["glm-5.2", "glm-4.7"])
def test_fp8_source_and_expanded_release(name: str, releases: Releases) -> None:
    """FP8 codes give the logits of their BF16 values, to the bit; so does a release that is expanded at load."""
    release = releases.release(name)
    codes, expanded = load(release.source), load(release.source, weights="bf16")
    ids = token_ids(codes, 40)
    ours = our_logits(codes, ids, 20, FP32)
    assert torch.equal(ours, our_logits(expanded, ids, 20, FP32))
    opened = our_logits(load(release.folder, weights="bf16"), ids, 20, FP32)
    model = load_model(release.export, dequantize=False).float()
    model.set_attn_implementation("eager")
    with lower_position_wins():
        assert relative(opened, all_logits(model, ids)) < TOLERANCE


def median_error(found: Tensor, exact: Tensor) -> float:
    """Of the rows' largest differences, over the largest logit: rows whose router chose otherwise do not count."""
    return float(((found - exact).abs().amax(-1) / exact.abs().max()).median())


@pytest.mark.parametrize("name", ["trained", "glm-4.7", "kimi-k2"])
def test_bfloat16_rounds_no_more_than_transformers_does(name: str, releases: Releases) -> None:
    """Both in BF16, each against transformers in float32: prompt rows and decode rows."""
    export = releases.release(name).export
    decoder = load_decoder(
        parse_model_config(read_config(export)), read_tensors(export).items(), LoadOptions("bfloat16")
    )
    ids = token_ids(decoder, 160)
    model = load_model(export, dequantize=False)
    model.set_attn_implementation("eager")
    with lower_position_wins():
        theirs = all_logits(model, ids).float()
        exact = all_logits(model.float(), ids)
    ours = our_logits(decoder, ids, 120, BF16)
    for rows in (slice(0, 120), slice(120, None)):
        # Seen: 0.8 to 1.15 of transformers' own.
        assert 0 < median_error(ours[rows], exact[rows]) < 1.4 * median_error(theirs[rows], exact[rows])


def bf16_rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def e4m3_rounded(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(torch.float32)


def indexer_rounded(key: Tensor) -> Tensor:
    """e4m3 with a power of two for the whole key, as docs/kernels/kv_cache.md has it."""
    scale = torch.exp2(torch.ceil(torch.log2((key.abs().amax(-1, keepdim=True) / 448).clamp(min=2.0**-22))))
    return (key / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale


@pytest.mark.parametrize("name", ["trained", "glm-4.7", "kimi-k2"])
@pytest.mark.parametrize("kv_format", [BF16, FP8_E4M3], ids=["bf16", "fp8_e4m3"])
def test_logits_over_a_rounded_cache(name: str, kv_format: KvFormat, releases: Releases) -> None:
    """A cache of transformers that rounds as ours does. A value near a rounding's border may go either way."""
    release = releases.release(name)
    decoder = load(release.folder)
    ids = token_ids(decoder, 120)
    rounded = bf16_rounded if kv_format is BF16 else e4m3_rounded
    model = exact_model(release.folder, release.export)
    cache = RoundedCache(rounded, indexer_rounded, config=model.config.get_text_config())
    with lower_position_wins():
        theirs = all_logits(model, ids, cache)
        exact = all_logits(model, ids)
    ours = our_logits(decoder, ids, 100, kv_format)
    error = relative(ours, theirs)
    assert error < ROUNDED_TOLERANCE
    assert relative(ours, exact) > 4 * error  # the rounding is what is compared


def test_greedy_text_of_the_example(releases: Releases, tmp_path: Path) -> None:
    """64 tokens after a prompt, of the FP8 checkpoint and of its INT4 release: each is transformers' likeliest next."""
    release = releases.release("trained")
    memopt.dequantize(release.source, tmp_path / "export", workers=1)
    for folder, export in ((release.source, tmp_path / "export"), (release.folder, release.export)):
        decoder = load(folder)
        prompt = token_ids(decoder, 30).tolist()
        text = greedy(decoder, prompt, NUM_DECODE_STEPS)
        with lower_position_wins():
            theirs = all_logits(exact_model(folder, export), torch.tensor(text))
        assert len(text) == 30 + NUM_DECODE_STEPS
        assert theirs[29:-1].argmax(-1).tolist() == text[30:]


def greedy(decoder: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    steps = Steps(decoder, FP32, max_tokens=len(prompt) + num_tokens)
    ids = list(prompt)
    logits = steps.logits(RowsOf(0, ids, 0))
    while len(ids) < len(prompt) + num_tokens:
        ids.append(int(logits[-1].argmax()))
        logits = steps.logits(RowsOf(0, ids[-1:], len(ids) - 1, is_prompt=False))
    return ids
