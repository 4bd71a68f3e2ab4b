"""Peak memory of a calibration does not grow with samples or layers: rows lie in files, one layer is in memory."""

from __future__ import annotations

from pathlib import Path

from calibrated_runs import VOCAB_SIZE, compress, experts, options, recipe
from rank_processes import run_ranks
from safetensors.torch import save_file
from tiny_checkpoints import make_checkpoint

SAMPLE_TOKENS = 64
HIDDEN_SIZE = 256
MIB = 2**20
# What the allocator and the interpreter keep may differ by this much from run to run.
SLACK_BYTES = 6 * MIB
RESET_PEAK = "5"


def peak_rss_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].removesuffix("kB")) * 1024


def growth(folder: Path, num_layers: int, num_samples: int) -> int:
    """Bytes by which a calibration raises the process's peak, after a small one has warmed it up."""
    import torch

    source = make_checkpoint(
        folder / "source",
        "glm-4.7-fp8",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=num_layers,
        num_nextn_predict_layers=0,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (num_samples, SAMPLE_TOKENS), generator=generator, dtype=torch.int32)
    save_file({"ids": ids}, folder / "ids.safetensors")
    form = recipe([experts("weighted")], "glm4_moe")
    common = {"sample_tokens": SAMPLE_TOKENS, "batch_tokens": 256, "coverage_tokens": 1}
    compress(source, folder / "warm", form, options(folder / "ids.safetensors", num_samples=8, **common), workers=1)
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    before = peak_rss_bytes()
    asked = options(folder / "ids.safetensors", num_samples=num_samples, **common)
    compress(source, folder / "out", form, asked, workers=1)
    return peak_rss_bytes() - before


def test_peak_memory_follows_neither_samples_nor_layers(tmp_path: Path) -> None:
    grown = {}
    for num_layers, num_samples in ((2, 32), (4, 32), (2, 256)):
        folder = tmp_path / f"{num_layers}-{num_samples}"
        folder.mkdir()
        (grown[num_layers, num_samples],) = run_ranks(1, growth, folder, num_layers, num_samples)
    # Three files of rows are there at once; in memory one alone would show.
    more_rows_bytes = (256 - 32) * SAMPLE_TOKENS * HIDDEN_SIZE * 4
    assert more_rows_bytes > 2 * SLACK_BYTES
    assert grown[2, 256] < grown[2, 32] + SLACK_BYTES
    assert grown[4, 32] < grown[2, 32] + SLACK_BYTES
