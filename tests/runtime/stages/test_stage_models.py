"""Two stages around the trained example: one engine's tokens, or those of the steps done by hand."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refusal
from signed_tiny_model import KEY, SignedModel, signed_tiny_model
from tiny_checkpoints import TINY_GLM5
from tiny_releases import sign

import memopt
from memopt.errors import HandOverError, UnsupportedError
from memopt.kernels.kv_cache.kv_format import indexer_views
from memopt.kernels.kv_cache.kv_load_reference import read_mla_tokens
from memopt.kernels.kv_cache.kv_slots import slots_of_pages
from memopt.kernels.kv_cache.kv_store_reference import mla_store
from memopt.kernels.kv_formats import BF16, kv_format
from memopt.kernels.layout import MLA_LATENT_SIZE, PAGE_TOKENS
from memopt.manifests.release import open_release
from memopt.runtime.engine.engine import Engine
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.engine.engine_options import EngineOptions
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.kv.kv_pools import new_kv_pools
from memopt.runtime.kv.layer_kv import KvPools, MlaLayerKv
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.step_rows import PrefillChunk, StepRows
from memopt.runtime.stages.decode_stage import DecodeStage
from memopt.runtime.stages.kv_geometry import geometry_of
from memopt.runtime.stages.model_identity import model_identity
from memopt.runtime.stages.page_transport import PageReceiver, PageSender
from memopt.runtime.stages.page_transport_local import local_transport
from memopt.runtime.stages.page_transport_shared_memory import SharedMemoryPageReceiver, SharedMemoryPageSender
from memopt.runtime.stages.page_transport_socket import SocketPageReceiver, SocketPageSender
from memopt.runtime.stages.prefill_stage import PrefillStage
from memopt.runtime.stages.stage_core import StageCore, load_stage_core

# The longest is longer than the model's index_topk of 256.
PROMPTS = {"short": [5, 6, 7], "page": [11] * 64, "long": [(7 * number) % 2000 + 1 for number in range(270)]}
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.5, top_p=0.9, seed=5, ignore_eos=True)
Requests = dict[str, tuple[list[int], SamplingParams]]
OPTIONS = EngineOptions(dtype="float32", num_pages=24, max_requests=4, max_step_tokens=100)


@dataclass(frozen=True)
class Releases:
    """Two releases of one checkpoint: its FP8 weights as they are, and INT4."""

    fp8: SignedModel
    int4: SignedModel


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    folder = tmp_path_factory.mktemp("stages")
    memopt.compress(TINY_GLM5, folder / "fp8", recipe="copy", workers=1, device="cpu")
    sign(folder / "fp8")
    (folder / "fp8.pub").write_bytes(KEY.public_key.pem)
    return Releases(SignedModel(folder / "fp8", folder / "fp8.pub"), signed_tiny_model(folder / "int4"))


class Recorder:
    """A decoder that counts the rows of logits that it gives, by their bits."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.rows: Counter[bytes] = Counter()

    def forward(self, rows: StepRows, pools: KvPools) -> torch.Tensor:
        return self.decoder.forward(rows, pools)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.decoder.logits(hidden)
        self.rows.update(row.numpy().tobytes() for row in logits)
        return logits


def recorded(core: EngineCore) -> Recorder:
    """The core's decoder, watched from now on."""
    decoder = core._runner._model
    assert isinstance(decoder, Decoder)
    core._runner._model = recorder = Recorder(decoder)
    return recorder


def load(release: SignedModel, **options: Any) -> StageCore:
    is_shared = options.pop("is_shared", False)
    return load_stage_core(release.folder, replace(OPTIONS, **options), key=release.key, is_shared=is_shared)


def requests_of(suffix: str, params: SamplingParams) -> Requests:
    """PROMPTS with these parameters, named apart."""
    return {f"{name} {suffix}": (prompt, params) for name, prompt in PROMPTS.items()}


def tokens_of_stages(
    kind: str, prefill_core: StageCore, decode_core: StageCore, requests: Requests
) -> dict[str, list[int]]:
    """What the two stages generate, over "local", "socket" or "shared_memory"."""
    sender: PageSender
    receiver: PageReceiver
    pools, tracker = prefill_core.core.pools, prefill_core.core.pages.tracker
    if kind == "local":
        sender, receiver = local_transport(pools, tracker)
    else:
        one, other = socket.socketpair()
        if prefill_core.region is not None:
            sender, receiver = SharedMemoryPageSender(one, prefill_core.region), SharedMemoryPageReceiver(other)
            os.close(prefill_core.region.file_descriptor)
        else:
            sender, receiver = SocketPageSender(one, pools, tracker), SocketPageReceiver(other)
    prefill = PrefillStage(prefill_core.core, prefill_core.model, sender)
    decode = DecodeStage(decode_core.core, decode_core.model, receiver)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    for name, (prompt, params) in requests.items():
        prefill.submit(name, prompt, params)
    end = time.monotonic() + 60
    while prefill.has_work or decode.has_work:
        assert time.monotonic() < end
        for event in prefill.step():
            assert event.state in ("offered", "taken"), event
        for decoded in decode.step():
            assert decoded.token_id is not None
            tokens[decoded.request_id].append(decoded.token_id)
    sender.close()
    receiver.close()
    for core in (prefill_core.core, decode_core.core):
        core.pages.check()
        assert core.pages.manager.num_used == 0
    return tokens


@pytest.fixture(scope="module")
def alone(releases: Releases) -> tuple[dict[str, list[int]], Counter[bytes]]:
    """Tokens by request, and rows of logits, of one engine."""
    tokens = {}
    with Engine(releases.int4.folder, key=releases.int4.key, dtype="float32", num_pages=24) as engine:
        recorder = recorded(engine.core)
        for name, params in (("greedy", GREEDY), ("sampled", SAMPLED)):
            for prompt, answer in zip(PROMPTS, engine.generate(list(PROMPTS.values()), params), strict=True):
                tokens[f"{prompt} {name}"] = list(answer.token_ids)
    return tokens, recorder.rows


@pytest.mark.parametrize("kind", ["local", "socket", "shared_memory"])
def test_with_one_format_tokens_are_one_engines(
    kind: str, releases: Releases, alone: tuple[dict[str, list[int]], Counter[bytes]]
) -> None:
    prefill = load(releases.int4, is_shared=kind == "shared_memory", integrity="tagged")
    decode = load(releases.int4, integrity="tagged")
    both = [recorded(stage.core) for stage in (prefill, decode)]
    requests = requests_of("greedy", GREEDY) | requests_of("sampled", SAMPLED)
    assert tokens_of_stages(kind, prefill, decode, requests) == alone[0]
    # Not the tokens alone: every bit of every row of logits.
    assert both[0].rows + both[1].rows == alone[1]


class DraftRecorder:
    """A drafter that notes what it guessed: the position, the token there, and the guess of the one after the next."""

    def __init__(self, core: EngineCore) -> None:
        assert core._runner._drafter is not None
        self._drafter = core._runner._drafter
        core._runner._drafter = self
        self.guesses: set[tuple[int, int, int]] = set()

    def draft(
        self, hidden: Any, next_tokens: Any, rows: StepRows, pools: KvPools, sampled: torch.Tensor
    ) -> torch.Tensor:
        drafts = self._drafter.draft(hidden, next_tokens, rows, pools, sampled)
        places = (rows.positions[sampled], rows.token_ids[sampled], drafts)
        self.guesses |= set(zip(*(place.tolist() for place in places), strict=True))
        return drafts


def test_the_mtp_layer_guesses_the_same_after_a_hand_over(
    releases: Releases, alone: tuple[dict[str, list[int]], Counter[bytes]]
) -> None:
    """Its keys are handed over like any layer's."""
    with Engine(releases.int4.folder, key=releases.int4.key, dtype="float32", num_pages=24, speculative=True) as engine:
        one = DraftRecorder(engine.core)
        engine.generate(list(PROMPTS.values()), GREEDY)
    prefill, decode = (load(releases.int4, speculative=True) for _ in range(2))
    first, rest = (DraftRecorder(stage.core) for stage in (prefill, decode))
    tokens = tokens_of_stages("socket", prefill, decode, requests_of("greedy", GREEDY))
    assert tokens == {name: found for name, found in alone[0].items() if name.endswith("greedy")}
    assert len(first.guesses) == len(PROMPTS)
    assert len(rest.guesses) >= len(PROMPTS) * (GREEDY.max_tokens // 2)
    # The one engine also guesses behind a draft of its first step, which the decode stage does not have.
    assert first.guesses | rest.guesses <= one.guesses
    with refusal(HandOverError, "keys of 6 layers, here are 5"):
        geometry_of(load(releases.int4).core.pools).require_same(geometry_of(prefill.core.pools))


def rows_by_hand(tokens: list[int], first: int, num_prompt_rows: int, table: torch.Tensor) -> StepRows:
    """Rows for tokens[first:] of one sequence."""
    positions = torch.arange(first, len(tokens))
    pages = table[positions // PAGE_TOKENS].to(torch.int64)
    chunks = (PrefillChunk(0, num_prompt_rows, first),) if num_prompt_rows else ()
    return StepRows(
        torch.tensor(tokens[first:]),
        positions,
        pages * PAGE_TOKENS + positions % PAGE_TOKENS,
        table.expand(len(positions), -1),
        (positions + 1).to(torch.int32),
        chunks,
        len(tokens),
    )


def convert_by_hand(source: KvPools, target: KvPools, table: torch.Tensor, num_tokens: int) -> None:
    """Every token of `source` into the same place of `target`, by the reference store."""
    slots = slots_of_pages(table, num_tokens)
    for old, new in zip(source.layers, target.layers, strict=True):
        assert isinstance(old, MlaLayerKv)
        assert isinstance(new, MlaLayerKv)
        tokens = read_mla_tokens(old.pool, slots, BF16)
        latent, rope = tokens[:, :MLA_LATENT_SIZE], tokens[:, MLA_LATENT_SIZE:]
        mla_store(latent, rope, new.pool, slots, new.kv_format, new.scale)
        if old.indexer_pool is not None and new.indexer_pool is not None:
            before, after = indexer_views(old.indexer_pool), indexer_views(new.indexer_pool)
            after.keys.copy_(before.keys)
            after.scales.copy_(before.scales)


@torch.inference_mode()
def tokens_by_hand(prefill: Recorder, decode: Recorder, format_name: str, prompt: list[int]) -> list[int]:
    """The prompt in one step by the prefill model, its cache converted, the rest token by token by the decode model."""
    config = prefill.decoder.config
    table = torch.tensor([4, 2, 6, 1, 5, 3], dtype=torch.int32)

    def pools_of(name: str) -> KvPools:
        return new_kv_pools(config, kv_format(name), 7, num_layers=config.num_layers, num_kv_heads_here=1)

    pools, target = pools_of("bf16"), pools_of(format_name)
    hidden = prefill.forward(rows_by_hand(prompt, 0, len(prompt), table), pools)
    tokens = [*prompt, int(prefill.logits(hidden[-1:]).argmax())]
    convert_by_hand(pools, target, table, len(prompt))
    while len(tokens) - len(prompt) < GREEDY.max_tokens:
        hidden = decode.forward(rows_by_hand(tokens, len(tokens) - 1, 0, table), target)
        tokens.append(int(decode.logits(hidden).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("kind", "format_name"),
    [("local", "bf16"), ("local", "fp8_e4m3"), ("local", "fp8_ds_mla"), ("socket", "fp8_ds_mla")],
)
def test_with_two_weights_and_formats_tokens_are_those_of_the_steps_by_hand(
    kind: str, format_name: str, releases: Releases
) -> None:
    prefill, decode = load(releases.fp8), load(releases.int4, kv_cache=format_name)
    models = [recorded(stage.core) for stage in (prefill, decode)]
    requests = requests_of("greedy", GREEDY)
    expected = {name: tokens_by_hand(*models, format_name, prompt) for name, (prompt, _) in requests.items()}
    rows = [model.rows.copy() for model in models]
    for model in models:
        model.rows.clear()
    assert tokens_of_stages(kind, prefill, decode, requests) == expected
    assert [model.rows for model in models] == rows


def test_other_formats_or_weights_would_show(releases: Releases) -> None:
    fp8, int4 = (recorded(load(release).core) for release in (releases.fp8, releases.int4))
    found = set()
    for prefill, decode in ((fp8, int4), (int4, fp8), (fp8, fp8), (int4, int4)):
        for name in ("bf16", "fp8_e4m3", "fp8_ds_mla"):
            decode.rows.clear()
            tokens_by_hand(prefill, decode, name, PROMPTS["page"])
            found.add(frozenset(decode.rows))
    assert len(found) == 12


def test_releases_of_one_checkpoint_have_one_identity_and_others_another(releases: Releases, tmp_path: Path) -> None:
    def identity_of(folder: Path) -> Any:
        with open_release(folder, key=releases.int4.key) as release:
            return model_identity(release)

    same = identity_of(releases.fp8.folder)
    assert same == identity_of(releases.int4.folder)
    # A fine-tuned model: the same names, shapes and headers, one other weight.
    tuned = shutil.copytree(TINY_GLM5, tmp_path / "tuned")
    with (tuned / "model-00003-of-00003.safetensors").open("r+b") as file:
        file.seek(-1000, 2)
        byte = file.read(1)[0]
        file.seek(-1000, 2)
        file.write(bytes([byte ^ 1]))
    memopt.compress(tuned, tmp_path / "tuned-int4", recipe="glm-5.2-int4", workers=1, device="cpu")
    other = identity_of(sign(tmp_path / "tuned-int4"))
    assert other.config == same.config
    with refusal(HandOverError, "another source"):
        same.require_same(other)
    retold = shutil.copytree(TINY_GLM5, tmp_path / "retold")
    config = (retold / "config.json").read_text()
    (retold / "config.json").write_text(config.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    memopt.compress(retold, tmp_path / "retold-copy", recipe="copy", workers=1, device="cpu")
    another = identity_of(sign(tmp_path / "retold-copy"))
    assert another.source == same.source
    with refusal(HandOverError, "another config.json"):
        same.require_same(another)


def test_a_stage_has_one_rank(releases: Releases) -> None:
    with refusal(UnsupportedError, "2 ranks"):
        load(releases.int4, tensor_parallel=2)
    with refusal(UnsupportedError, "fp8_e4m3"):
        load(releases.int4, is_shared=True, kv_cache="fp8_e4m3")


def test_a_socket_pair_is_closed_with_the_transport() -> None:
    one, other = socket.socketpair()
    receiver = SocketPageReceiver(other)
    receiver.close()
    assert one.recv(1) == b""
    assert other.fileno() == -1
    one.close()
