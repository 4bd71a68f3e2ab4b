"""Task scores from lm-eval's results: what is compared, what is refused, and how lm-eval is called."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memopt.compressor.evaluate.lm_eval_run import Endpoint, check_tasks, run_tasks
from memopt.compressor.evaluate.task_scores import compare_tasks, read_results
from memopt.errors import DataFileError, NetworkError, UnsupportedError, UsageError


def results(num_samples: int = 200, **scores: float) -> dict[str, Any]:
    """A results file as lm-eval 0.4 writes it."""
    return {
        "results": {
            task: {
                "alias": task,
                "exact_match,strict-match": score,
                "exact_match_stderr,strict-match": 0.02,
                "exact_match,flexible-extract": score + 0.01,
                "exact_match_stderr,flexible-extract": 0.02,
            }
            for task, score in scores.items()
        },
        "n-samples": {task: {"original": 1319, "effective": num_samples} for task in scores},
    }


def test_scores_are_points_and_the_drop_is_base_minus_release() -> None:
    (score,) = compare_tasks(results(gsm8k=0.7), results(gsm8k=0.69))
    assert (score.task, score.metric, score.num_samples) == ("gsm8k", "exact_match,flexible-extract", 200)
    assert score.drop == pytest.approx(1.0)
    assert score.base_error == pytest.approx(2.0)


def test_acc_norm_goes_before_acc() -> None:
    table: dict[str, Any] = {"results": {"arc": {"acc,none": 0.5, "acc_norm,none": 0.6, "acc_stderr,none": "N/A"}}}
    table["n-samples"] = {"arc": {"effective": 7}}
    (score,) = compare_tasks(table, table)
    assert (score.metric, score.base, score.base_error) == ("acc_norm,none", 60.0, 0.0)


def test_a_group_without_figures_is_passed_over_and_one_with_them_is_not() -> None:
    """lm-eval 0.4.13, api/group.py: a group that aggregates nothing has its name and alias alone."""
    table = results(a=0.5, b=0.25)
    table["results"] |= {"plain": {"alias": "plain", "name": "plain"}, "mmlu": {"alias": "mmlu", "acc,none": 0.4}}
    table["group_subtasks"] = {"plain": ["a", "b"], "mmlu": ["a", "b"], "b": []}
    assert [(score.task, score.num_samples) for score in compare_tasks(table, table)] == [
        ("a", 200),
        ("b", 200),
        ("mmlu", 400),
    ]
    del table["group_subtasks"]
    table["n-samples"]["mmlu"] = {"effective": 400}
    with pytest.raises(DataFileError, match="task plain has none of"):
        compare_tasks(table, table)


@pytest.mark.parametrize(
    "entry", [None, {}, {"effective": 0}, {"effective": -1}, {"effective": True}, {"effective": 2.0}]
)
def test_a_score_of_no_known_number_of_documents_is_refused(entry: object) -> None:
    table = results(a=0.5)
    table["n-samples"]["a"] = entry
    with pytest.raises(DataFileError, match="task a: n-samples names no document"):
        compare_tasks(table, table)


def test_a_group_within_itself_has_no_documents() -> None:
    table = {"results": {"a": {"acc,none": 0.5}}, "group_subtasks": {"a": ["b"], "b": ["a"]}}
    with pytest.raises(DataFileError, match="n-samples names no document"):
        compare_tasks(table, table)


def test_a_task_that_many_groups_of_a_group_name_counts_once() -> None:
    """Group by group, with two ways to each, 2**5000 ways would be walked."""
    table = results(a=0.5)
    table["results"] = {"0": {"acc,none": 0.5}}
    table["group_subtasks"] = {str(number): [str(number + 1)] * 2 + ["a"] for number in range(5_000)}
    table["group_subtasks"]["5000"] = ["a", "a"]
    (score,) = compare_tasks(table, table)
    assert score.num_samples == 200


@pytest.mark.parametrize("value", [True, "0.5", -0.1, 1.5, None, [0.5]])
def test_a_score_is_a_share(value: object) -> None:
    table = {"results": {"a": {"acc,none": value}}}
    with pytest.raises(DataFileError, match="from 0 to 1"):
        compare_tasks(table, table)


@pytest.mark.parametrize(
    ("base", "release", "words"),
    [
        (results(a=0.1, b=0.2), results(a=0.1), "task b was run on one model only"),
        (results(a=0.1), results(a=0.1, num_samples=100), "200 samples, and .* of 100"),
        ({"results": {"a": {"perplexity,none": 3.0}}}, results(a=0.1), "task a has none of acc_norm"),
    ],
)
def test_what_cannot_be_compared_is_refused(base: dict[str, Any], release: dict[str, Any], words: str) -> None:
    with pytest.raises(DataFileError, match=words):
        compare_tasks(base, release)


def test_a_file_without_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text('{"results": {}}')
    with pytest.raises(DataFileError, match="no results of lm-eval"):
        read_results(tmp_path / "r.json")


def fake_lm_eval(code: int, tables: Sequence[dict[str, Any]], seen: list[Sequence[str]]) -> Any:
    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        seen.append(command)
        folder = Path(command[command.index("--output_path") + 1]) / "model"
        folder.mkdir()
        for number, table in enumerate(tables):
            (folder / f"results_{number}.json").write_text(json.dumps(table))
        return subprocess.CompletedProcess(command, code, "", "line one\nconnection refused\n")

    return run


ENDPOINT = Endpoint("http://localhost:8000/v1/completions", "7", Path("a,b=c"), 4096)


def test_lm_eval_is_called_with_the_endpoint_and_its_file_is_read() -> None:
    seen: list[Sequence[str]] = []
    found = run_tasks(ENDPOINT, ["gsm8k", "arc"], limit=5, run=fake_lm_eval(0, [results(gsm8k=0.5)], seen))
    assert found["results"].keys() == {"gsm8k"}
    words = seen[0]
    assert words[words.index("--tasks") + 1] == "gsm8k,arc"
    assert words[words.index("--limit") + 1] == "5"
    assert json.loads(words[words.index("--model_args") + 1]) == {
        "model": "7",
        "base_url": "http://localhost:8000/v1/completions",
        "tokenizer": "a,b=c",
        "tokenizer_backend": "huggingface",
        "tokenized_requests": True,
        "max_length": 4096,
    }


def test_a_failure_is_told_in_lm_evals_words() -> None:
    with pytest.raises(NetworkError, match="code 1: line one connection refused"):
        run_tasks(ENDPOINT, ["gsm8k"], run=fake_lm_eval(1, [], []))


def test_of_a_traceback_the_exception_is_told() -> None:
    """As lm-eval 0.4.13 ends: its progress bar comes after the traceback."""
    traceback = (
        "2026-11-30:03:12:49 INFO     [evaluator:589] Running loglikelihood requests\n"
        'Traceback (most recent call last):\n  File "api_models.py", line 482, in model_call\n'
        "    response.raise_for_status()\n"
        "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: http://h/v1/nope\n"
        "\rRequesting API:   0%|          | 0/48 [00:04<?, ?it/s]\n"
    )
    with pytest.raises(NetworkError, match=r"code 1: requests\.exceptions\.HTTPError: 404 Client Error") as caught:
        run_tasks(ENDPOINT, ["a"], run=lambda command: subprocess.CompletedProcess(command, 1, "", traceback))
    assert "Requesting API" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "tasks", "words"),
    [
        ("localhost:8000", ["a"], "no address"),
        (ENDPOINT.url, [], "tasks"),
        (ENDPOINT.url, ["--help"], "tasks"),
        (ENDPOINT.url, ["a,b"], "tasks"),
    ],
)
def test_a_wrong_call_is_refused(url: str, tasks: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        run_tasks(Endpoint(url, "glm", Path("c"), 4096), tasks, run=fake_lm_eval(0, [], []))


def test_a_missing_lm_eval_is_told() -> None:
    with pytest.raises(UnsupportedError, match="lm-eval, or transformers"):
        check_tasks(ENDPOINT, ["gsm8k"], is_installed=False)
