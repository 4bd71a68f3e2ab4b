"""Scores as Markdown, and the places in a document where they belong."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kv_quality.measure import ModelResult
from benchmarks.kv_quality.scores import ANSWER, PROMPT, CaseScores, Score

_TITLES = {PROMPT: "end of a prompt", ANSWER: "answer"}


def markdown(result: ModelResult) -> str:
    """Two tables, one for rows of prompts and one for rows of answers, and what was compared to the bit."""
    lines: list[str] = []
    base = result.cases[0]
    for kind, title in _TITLES.items():
        ends = result.plan.turns.ends
        figures = [f"{figure} {end:,}" for figure in ("KL", "top-1", "perplexity") for end in ends]
        header = [f"{title}: KV cache", *figures]
        lines += [_row(header), "|---" * len(header) + "|"]
        lines += [_row([case.name, *_cells(case, kind)]) for case in result.cases]
        counts = ", ".join(str(score.num_tokens) for score in base.scores[kind])
        lines += ["", f"Predictions: {counts}.", ""]
    compared = ", ".join(f"{name} {count:,}" for name, count in result.compared_rows.items())
    lines.append(f"Rows with the same bits in one shot, in chunks, and over turns: {compared}.")
    return "\n".join(lines)


def replaced(text: str, name: str, part: str) -> str:
    """`text` with `part` between the markers of `name`. ValueError unless it has each of them once, in order."""
    begin, end = markers(name)
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in after or end in after:
        raise ValueError(f"the document needs one {begin} and, behind it, one {end}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def write_into(path: Path, name: str, part: str) -> None:
    """Replace the part of `name` in a document."""
    path.write_text(replaced(path.read_text(encoding="utf-8"), name, part), encoding="utf-8")


def markers(name: str) -> tuple[str, str]:
    """The lines before and behind a model's tables."""
    return f"<!-- kv-quality {name} begin -->", f"<!-- kv-quality {name} end -->"


def _cells(case: CaseScores, kind: str) -> list[str]:
    scores = case.scores[kind]
    return [
        *(_kl(score) for score in scores),
        *(f"{score.top1:.1%}".replace("%", " %") for score in scores),
        *(f"{score.perplexity:,.1f}" if score.perplexity < 1e4 else "> 10,000" for score in scores),
    ]


def _kl(score: Score) -> str:
    return f"{score.kl:.5f}" if score.kl < 1 else f"{score.kl:.2f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
