"""The Markdown table of probes: KL on each text, and its paired change against the default."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.smollm2.probes.paired_change import paired_change
from benchmarks.smollm2.probes.probe_results import ProbeResult


def probe_table(results: Sequence[ProbeResult], base: ProbeResult) -> str:
    """A line a probe, in the order given, and what they were measured on."""
    texts = list(base.texts)
    columns = ["probe", "bits a weight"]
    for text in texts:
        columns += [f"KL, {text.removeprefix('held-out-')}", "change (95 %)"]
    columns += ["top-1", "CPU s"]
    lines = [_line(columns), "|---" * len(columns) + "|"]
    lines += [_line(_cells(result, base, texts)) for result in results]
    counts = ", ".join(f"{sum(base.texts[text].num_tokens):,} predictions of {text}" for text in texts)
    lines += ["", f"{base.num_windows} windows a text ({counts}); checkpoint and texts sha256 {base.source}."]
    return "\n".join(lines)


def _cells(result: ProbeResult, base: ProbeResult, texts: Sequence[str]) -> list[str]:
    cells = [result.probe.name, f"{result.bits_per_weight:.3f}"]
    for text in texts:
        change = ""
        if result.probe != base.probe:
            found = paired_change(result.texts[text], base.texts[text])
            change = f"{found.value:+.1%} ({found.low:+.1%} to {found.high:+.1%})"
        cells += [f"{result.texts[text].kl:.4f}", change]
    top1 = " / ".join(f"{result.texts[text].top1:.3f}" for text in texts)
    return [*cells, top1, f"{result.cpu_seconds:.0f}"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
