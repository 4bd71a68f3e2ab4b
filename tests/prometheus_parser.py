"""A strict reader of Prometheus' text format 0.0.4, written from its specification alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ([0-9]+|[0-9]*\.[0-9]+(?:e[-+][0-9]+)?|[0-9]e-[0-9]+)")
SUFFIXES = {"gauge": {""}, "counter": {""}, "histogram": {"_bucket", "_sum", "_count"}}
ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass
class Family:
    """One metric: its kind, its help text, and (suffix, labels, value) of each sample."""

    kind: str
    help_text: str
    samples: list[tuple[str, dict[str, str], float]] = field(default_factory=list)


def parse(text: str) -> dict[str, Family]:
    """All families by name; AssertionError for anything that the format does not allow."""
    assert text.endswith("\n")
    families: dict[str, Family] = {}
    lines = text[:-1].split("\n")
    place = 0
    while place < len(lines):
        help_line = re.fullmatch(rf"# HELP ({NAME}) ([^\n]+)", lines[place])
        assert help_line, lines[place]
        name = help_line[1]
        type_line = re.fullmatch(rf"# TYPE {re.escape(name)} (gauge|counter|histogram)", lines[place + 1])
        assert type_line, lines[place + 1]
        assert name not in families, f"{name} stands in two groups"
        family = families[name] = Family(type_line[1], help_line[2])
        place += 2
        while place < len(lines) and not lines[place].startswith("#"):
            family.samples.append(_sample(name, family.kind, lines[place]))
            place += 1
        assert family.samples, name
        seen = [(suffix, *sorted(labels.items())) for suffix, labels, _ in family.samples]
        assert len(set(seen)) == len(seen), f"{name} has a sample twice"
        if family.kind == "histogram":
            _check_histogram(family)
    return families


def _sample(name: str, kind: str, line: str) -> tuple[str, dict[str, str], float]:
    match = SAMPLE.fullmatch(line)
    assert match, line
    assert match[1].startswith(name), line
    suffix = match[1][len(name) :]
    assert suffix in SUFFIXES[kind], line
    labels: dict[str, str] = {}
    for label in re.findall(LABEL, match[2] or ""):
        key, _, value = label.partition("=")
        assert key not in labels, line
        labels[key] = re.sub(r"\\[\\\"n]", lambda found: ESCAPED[found[0]], value[1:-1])
    return suffix, labels, float(match[3])


def _check_histogram(family: Family) -> None:
    ends = [float(labels["le"]) for suffix, labels, _ in family.samples if suffix == "_bucket"]
    counts = [value for suffix, _, value in family.samples if suffix == "_bucket"]
    assert ends == sorted(set(ends))
    assert ends[-1] == float("inf")
    assert counts == sorted(counts)
    assert [value for suffix, _, value in family.samples if suffix == "_count"] == [counts[-1]]
    assert len([1 for suffix, _, _ in family.samples if suffix == "_sum"]) == 1
