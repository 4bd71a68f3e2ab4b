"""Scores of benchmark tasks, by lm-eval (EleutherAI lm-evaluation-harness) through an OpenAI-compatible endpoint.

lm-eval is an extra, run as its own process: `lm_eval run --model local-completions --model_args base_url=…` writes
`results_*.json`, whose "results" hold, for each task, "metric,filter" and "metric_stderr,filter".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memopt.errors import DataFileError
from memopt.manifests.strict_json import parse_json_object, read_capped

MAX_RESULTS_BYTES = 2**26
POINTS = 100.0
# lm-eval's metrics that are shares from 0 to 1 and mean "better" when larger, the one to prefer first.
PREFERRED_METRICS = ("acc_norm", "acc", "exact_match", "pass@1", "f1", "mc2")


@dataclass(frozen=True, slots=True)
class TaskScore:
    """Scores of one task in points (0 to 100), with standard errors; `drop` is base minus release."""

    task: str
    metric: str
    num_samples: int
    base: float
    base_error: float
    release: float
    release_error: float

    @property
    def drop(self) -> float:
        """Points lost; below zero when the release does better."""
        return self.base - self.release


@dataclass(frozen=True, slots=True)
class _Score:
    metric: str
    value: float
    error: float
    num_samples: int


def read_results(path: Path) -> dict[str, Any]:
    """lm-eval's results file; DataFileError for anything that has no "results"."""
    table = parse_json_object(read_capped(path, MAX_RESULTS_BYTES, DataFileError), path.name, DataFileError)
    if not isinstance(table.get("results"), dict) or not table["results"]:
        raise DataFileError("has no results of lm-eval", file=path.name, remedy="give lm-eval's results_*.json")
    return table


def compare_tasks(base: Mapping[str, Any], release: Mapping[str, Any]) -> tuple[TaskScore, ...]:
    """Scores of all tasks in both results files, by name; a group's row without figures of its own is passed over.

    DataFileError for tasks that only one has, for another number of samples, or for a task without a metric known here:
    what cannot be compared must not pass a gate by being absent.
    """
    names = {
        name: set(table["results"]) - _plain_groups(table) for name, table in (("base", base), ("release", release))
    }
    odd = sorted(names["base"] ^ names["release"])
    if odd:
        raise DataFileError(f"task {odd[0]} was run on one model only", remedy="run the same tasks on both")
    scores: list[TaskScore] = []
    for task in sorted(names["base"]):
        of_base, of_release = (_score(task, table) for table in (base, release))
        if (of_base.metric, of_base.num_samples) != (of_release.metric, of_release.num_samples):
            raise DataFileError(
                f"task {task}: {of_base.metric} of {of_base.num_samples} samples, and {of_release.metric} of "
                f"{of_release.num_samples}",
                remedy="run both on the same samples (--task-limit)",
            )
        scores.append(
            TaskScore(
                task,
                of_base.metric,
                of_base.num_samples,
                of_base.value,
                of_base.error,
                of_release.value,
                of_release.error,
            )
        )
    return tuple(scores)


def _plain_groups(table: Mapping[str, Any]) -> set[str]:
    """Groups of tasks that lm-eval aggregates nothing for: their rows hold names alone."""
    groups, results = table.get("group_subtasks"), table["results"]
    if not isinstance(groups, dict):
        return set()
    rows = {name: results[name] for name in groups if groups[name] and isinstance(results.get(name), dict)}
    return {name for name, row in rows.items() if not any("," in key for key in row)}


def _score(task: str, table: Mapping[str, Any]) -> _Score:
    """The preferred metric of a task in points."""
    row = table["results"][task]
    keys = (
        [key for key in row if "," in key and not key.split(",")[0].endswith("_stderr")]
        if isinstance(row, dict)
        else []
    )
    for metric in PREFERRED_METRICS:
        # A task may have the metric under several filters: the first by name, in both files alike.
        for key in sorted(key for key in keys if key.split(",")[0] == metric):
            value, error = row[key], row.get(f"{metric}_stderr,{key.split(',', 1)[1]}")
            if type(value) in (int, float) and 0 <= value <= 1:
                known_error = float(error) if type(error) in (int, float) and 0 <= error <= 1 else 0.0
                return _Score(key, POINTS * value, POINTS * known_error, _num_samples(task, table))
    raise DataFileError(
        f"task {task} has none of {', '.join(PREFERRED_METRICS)} from 0 to 1", remedy="choose tasks with such a metric"
    )


def _num_samples(task: str, table: Mapping[str, Any]) -> int:
    """Documents that lm-eval really ran ("effective"), of a group those of its tasks; DataFileError without any.

    A task that several of a group's groups name counts once.
    """
    counts, groups = table.get("n-samples"), table.get("group_subtasks")
    total, names, seen = 0, [task], {task}
    while names:
        name = names.pop()
        entry = counts.get(name) if isinstance(counts, dict) else None
        parts = groups.get(name) if isinstance(groups, dict) else None
        if entry is None and isinstance(parts, list) and parts:
            more = {str(part) for part in parts} - seen
            names += sorted(more)
            seen |= more
            continue
        effective = entry.get("effective") if isinstance(entry, dict) else None
        if type(effective) is not int or effective < 1:
            raise _no_documents(name)
        total += effective
    if not total:
        raise _no_documents(task)
    return total


def _no_documents(task: str) -> DataFileError:
    return DataFileError(
        f"task {task}: n-samples names no document that was run", remedy="give the results_*.json of a whole run"
    )
