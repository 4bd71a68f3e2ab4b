"""A calibration in a process of its own, and what its tensors took: in each wave of experts, and in all."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from calibrated_runs import COVERAGE_TOKENS, VOCAB_SIZE, compress, experts, options, recipe
from safetensors.torch import load_file, save_file
from tensor_memory_peak import TensorMemoryPeak
from tiny_checkpoints import make_checkpoint

from memopt.compressor.calibrate import calibrate_model
from memopt.compressor.calibrate.expert_memory import ExpertMemory
from memopt.compressor.calibrate.expert_waves import ExpertCalibration
from memopt.compressor.evaluate.stored_model import StoredModel
from memopt.runtime.model.decoder_layer import DecoderLayer

SAMPLE_TOKENS = 64
BATCH_TOKENS = 128
BIAS_OF_CHOSEN = 100.0
RESET_PEAK = "5"
# malloc.h
M_MMAP_THRESHOLD = -3
MMAP_THRESHOLD_BYTES = 1 << 18


@dataclass(frozen=True)
class Size:
    """The first layer is dense. `is_crowded`: every token goes to the same two experts."""

    num_layers: int = 2
    num_samples: int = 16
    num_experts: int = 16
    hidden_size: int = 256
    is_crowded: bool = False
    coverage_tokens: int = COVERAGE_TOKENS

    @property
    def rows_bytes(self) -> int:
        """Of a file of hidden states."""
        return self.num_samples * SAMPLE_TOKENS * self.hidden_size * torch.float32.itemsize


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes of tensors at their highest: `wave_peaks` above those at each wave's start, `peak_bytes` in all.

    `layer_bytes`: of the largest layer when it is read.
    """

    wave_peaks: tuple[int, ...]
    peak_bytes: int
    layer_bytes: int


@dataclass(frozen=True)
class ResidentFigures:
    """`growth_bytes`: by which a run raised the process's peak of resident memory. `layer_bytes`: of the largest layer
    if all of it were float32.
    """

    growth_bytes: int
    layer_bytes: int


def make_source(folder: Path, size: Size) -> Path:
    """A checkpoint with routed experts of a quarter of the hidden size."""
    source = make_checkpoint(
        folder,
        "glm-4.7-fp8",
        vocab_size=VOCAB_SIZE,
        hidden_size=size.hidden_size,
        moe_intermediate_size=size.hidden_size // 4,
        num_hidden_layers=size.num_layers,
        n_routed_experts=size.num_experts,
        num_nextn_predict_layers=0,
    )
    if size.is_crowded:
        for file in source.glob("*.safetensors"):
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if name.endswith("e_score_correction_bias"):
                    tensor[:2] = BIAS_OF_CHOSEN
            save_file(tensors, file, metadata={"format": "pt"})
    return source


def write_samples(path: Path, num_samples: int) -> Path:
    """Random ids."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (num_samples, SAMPLE_TOKENS), generator=generator, dtype=torch.int32)
    save_file({"ids": ids}, path)
    return path


def tensor_memory(folder: Path, method: str, size: Size, budget_bytes: int, experts_more: int = 1) -> MemoryFigures:
    """Calibrate a checkpoint of `size`; `experts_more`: that many times the experts of a wave that fit.

    For a process of its own (run_ranks): the mode stays on its threads.
    """
    memory = TensorMemoryPeak()
    wave_peaks: list[int] = []
    layer_bytes: list[int] = []
    one_wave, at_once, read_layer = ExpertCalibration._calibrate_wave, ExpertMemory.experts_at_once, StoredModel.layer

    def measured_wave(experts: ExpertCalibration, wave: range) -> None:
        before, memory.peak_bytes, peak = memory.live_bytes, memory.live_bytes, memory.peak_bytes
        one_wave(experts, wave)
        wave_peaks.append(memory.peak_bytes - before)
        memory.peak_bytes = max(memory.peak_bytes, peak)

    def measured_layer(model: StoredModel, *given: Any) -> DecoderLayer:
        before = memory.live_bytes
        layer = read_layer(model, *given)
        layer_bytes.append(memory.live_bytes - before)
        return layer

    def watched_pool(num_threads: int, **more: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(num_threads, initializer=memory.__enter__, **more)

    ExpertCalibration._calibrate_wave = measured_wave  # type: ignore[method-assign]
    ExpertMemory.experts_at_once = lambda *given: experts_more * at_once(*given)  # type: ignore[method-assign]
    calibrate_model.ThreadPoolExecutor = watched_pool  # type: ignore[attr-defined]
    StoredModel.layer = measured_layer  # type: ignore[method-assign]
    source = make_source(folder / "source", size)
    data = write_samples(folder / "ids.safetensors", size.num_samples)
    form = recipe([experts(method, max_fallback=1.0)], "glm4_moe")
    wanted = options(
        data,
        num_samples=size.num_samples,
        sample_tokens=SAMPLE_TOKENS,
        batch_tokens=BATCH_TOKENS,
        coverage_tokens=size.coverage_tokens,
        memory_bytes=budget_bytes,
    )
    with memory:
        compress(source, folder / "out", form, wanted, workers=1)
    return MemoryFigures(tuple(wave_peaks), memory.peak_bytes, max(layer_bytes))


def resident_growth(folder: Path, method: str, size: Size, budget_bytes: int) -> ResidentFigures:
    """Calibrate a checkpoint of `size`, after a small one has warmed the process up; for a process of its own."""
    # Freed blocks go back to the system: what glibc would keep of them differs from run to run by several MiB.
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    source = make_source(folder / "source", size)
    asked: dict[str, Any] = {"sample_tokens": SAMPLE_TOKENS, "batch_tokens": 2 * BATCH_TOKENS, "coverage_tokens": 1}
    form = recipe([experts(method)], "glm4_moe")
    small = Size(num_samples=4, num_experts=size.num_experts)
    data = write_samples(folder / "small.safetensors", small.num_samples)
    warm = options(data, num_samples=small.num_samples, memory_bytes=budget_bytes, **asked)
    compress(make_source(folder / "small", small), folder / "warm", form, warm, workers=1)
    data = write_samples(folder / "ids.safetensors", size.num_samples)
    wanted = options(data, num_samples=size.num_samples, memory_bytes=budget_bytes, **asked)
    library.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before = peak_rss_bytes()
    compress(source, folder / "out", form, wanted, workers=1)
    layers: dict[str, int] = {}
    for file in source.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer = name.partition(".layers.")[2].partition(".")[0]
            layers[layer] = layers.get(layer, 0) + tensor.numel() * torch.float32.itemsize
    return ResidentFigures(peak_rss_bytes() - before, max(layers.values()))


def peak_rss_bytes() -> int:
    """The most memory of this process that was resident since the last reset."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024
