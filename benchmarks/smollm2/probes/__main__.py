"""What brings how much for GPTQ on SmolLM2: one process, the product's kernels, a table with paired intervals.

    python -m benchmarks.smollm2.probes OUT [--probes gptq-g32 samples-128 ...] [--windows 16] [--downloads FOLDER]
                                            [--write docs/quality-results.md]

OUT is the folder of `benchmarks.smollm2.quality` (build/quality), which is prepared where it is not there. Products are
of BF16 numbers, so compare probes with each other only. Every result is kept in OUT/smollm2/probes: what is there is
not measured again, so delete that folder after a change of the kernels. About 100 CPU seconds a probe.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.smollm2.probes.calibrate_probe import ProbeCalibration
from benchmarks.smollm2.probes.group_sizes import LayerGroups, choose_groups
from benchmarks.smollm2.probes.probe import BASE, PROBES, UNIFORM, Probe
from benchmarks.smollm2.probes.probe_results import ProbeResult, ResultFolder
from benchmarks.smollm2.probes.probe_table import probe_table
from benchmarks.smollm2.probes.probe_texts import ProbeTexts
from benchmarks.smollm2.probes.split_forward import SplitForward
from benchmarks.smollm2.probes.split_model import read_split_model
from benchmarks.smollm2.probes.window_kl import HeldOutText
from benchmarks.smollm2.quality import write_between
from benchmarks.smollm2.quality_models import QualityModel, file_digest, smollm2
from memopt.errors import MemoptError

NUM_WINDOWS = 16
BY_NAME = {probe.name: probe for probe in PROBES}
MARKERS = ("<!-- probes begin -->", "<!-- probes end -->")


class ProbeBench:
    """The model and texts of all probes."""

    def __init__(self, model: QualityModel, num_windows: int) -> None:
        split = read_split_model(model.checkpoint)
        self._forward = SplitForward(split)
        self._texts = ProbeTexts(model, split.config.vocab_size)
        self._source = source_digest(model)
        self._results = ResultFolder(model.folder / "probes", self._source, num_windows)
        self._num_windows = num_windows
        self._names = model.texts
        self._held_out: dict[str, HeldOutText] = {}

    def result(self, probe: Probe) -> ProbeResult:
        """The kept result, or a new one."""
        return self._results.find(probe) or self._measured(probe)

    def _measured(self, probe: Probe) -> ProbeResult:
        groups = self._groups(probe)
        started = time.process_time()
        samples = self._texts.samples(probe.text, probe.num_samples)
        found = ProbeCalibration(self._forward, samples, probe).run(groups)
        cpu_seconds = time.process_time() - started
        scores = {name: self._text(name).scores(found.routed) for name in self._names}
        result = ProbeResult(probe, self._source, self._num_windows, groups, found.errors, scores, cpu_seconds)
        self._results.keep(result)
        kl = ", ".join(f"{name} {score.kl:.4f}" for name, score in scores.items())
        print(f"{probe.name}: {kl}; {time.process_time() - started:.0f} CPU s", file=sys.stderr, flush=True)
        return result

    def _text(self, name: str) -> HeldOutText:
        if name not in self._held_out:
            self._held_out[name] = HeldOutText(self._forward, self._texts.windows(name, self._num_windows))
        return self._held_out[name]

    def _groups(self, probe: Probe) -> tuple[LayerGroups, ...]:
        if probe.mixed_bits is None:
            return (LayerGroups(probe.gate_up_group, probe.down_group),) * len(self._forward.model.layers)
        uniform = [self.result(BY_NAME[name]) for name in UNIFORM]
        return choose_groups({result.probe.down_group: result.errors for result in uniform}, probe.mixed_bits)


def source_digest(model: QualityModel) -> str:
    """SHA-256 (hex) over those of the checkpoint's weight files and the texts."""
    texts = ("calibration", *model.texts)
    paths = [*sorted(model.checkpoint.glob("*.safetensors")), *(model.folder / f"{name}.jsonl" for name in texts)]
    return hashlib.sha256("".join(file_digest(path) for path in paths).encode()).hexdigest()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and print the table."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    try:
        model = smollm2(options.output / "smollm2", options.downloads or options.output / "downloads")
        bench = ProbeBench(model, options.windows)
        base = bench.result(BY_NAME[BASE])
        table = probe_table([bench.result(BY_NAME[name]) for name in options.probes], base)
    except MemoptError as problem:
        sys.exit(f"probes: {problem}")
    print(table)
    if options.write is not None:
        write_between(options.write, *MARKERS, table)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Variants of calibrated rounding on SmolLM2, compared by KL.")
    parser.add_argument("output", type=Path, help="the folder of benchmarks.smollm2.quality")
    parser.add_argument("--downloads", type=Path, help="where the packages are kept (OUTPUT/downloads)")
    parser.add_argument("--probes", nargs="+", choices=list(BY_NAME), default=list(BY_NAME), metavar="PROBE")
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="of a text, evenly spaced over its documents")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", type=Path, help="a document with markers for the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
