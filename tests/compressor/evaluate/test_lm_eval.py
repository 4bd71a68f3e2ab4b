"""`memopt evaluate --task` with the real lm-eval, on servers of memopt's own engine; no network.

Needs the extra "tasks" (`make test-tasks` installs it and runs this file).
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.invoke import Outcome, invoke
from completions_server import ServedModel, Server, serving
from safetensors.torch import load_file, save_file
from signing_keys import fixed_key
from tiny_checkpoints import TINY_GLM5

import memopt
from memopt.compressor.evaluate.quality_file import parse_quality
from memopt.compressor.recipe import parse_recipe
from memopt.errors import QualityGateError
from memopt.manifests.signer import KeySigner

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra tasks: make test-tasks"),
]
KEY = fixed_key(1)
NAMES = ("size", "name", "path", "value", "index", "count", "data", "key")
# A line's two ends, the wanted one first: four that Python decides, and two that nothing does.
ENDS = (
    (" = self.", " is self."), (".append(", "append("), ("[0]", "(0)"), (" = None\n", " = none\n"),
    (" is not None", " is None"), (" += 1", " -= 1"),
)  # fmt: skip
EXIT_GATE = 5
GATE = {"kl_max": 5.0, "score_drop_max_points": 0.8}


@dataclass(frozen=True)
class Made:
    """`release` is not signed, as `memopt evaluate` wants it; the folders in `served` are."""

    release: Path
    tasks: Path
    data: Path
    key: Path
    served: dict[str, Path]


def signed(folder: Path, name: str) -> Path:
    memopt.sign_release(folder, [KeySigner(KEY)], memopt.SignOptions(f"acme/{name}", 1))
    return folder


def damaged_source(folder: Path) -> Path:
    """The example with the rows of its head shifted: every token is taken for its neighbour."""
    shutil.copytree(TINY_GLM5, folder)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if "lm_head.weight" in tensors:
            tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, dims=0)
            save_file(tensors, file, metadata={"format": "pt"})
    return folder


def write_tasks(folder: Path) -> Path:
    """A task of two choices and a generative one, each a YAML beside its documents."""
    folder.mkdir()
    documents = [{"text": f"    {name}", "choices": [*ends], "right": 0} for name in NAMES for ends in ENDS]
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    answers = [{"text": f"class {name.title()}:\n    def __init__(", "answer": "self"} for name in NAMES]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}", "num_fewshot": 0}
    tables: list[dict[str, Any]] = [
        {
            "task": "tiny_choices", "output_type": "multiple_choice", "target_delimiter": "",
            "doc_to_choice": "{{choices}}", "doc_to_target": "right",
            "metric_list": [{"metric": "acc"}],
        },
        {
            "task": "tiny_answers", "output_type": "generate_until", "target_delimiter": "",
            "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": [",", ")", "\n"], "max_gen_toks": 4, "temperature": 0.0},
            "metric_list": [{"metric": "exact_match"}],
        },
    ]  # fmt: skip
    for table, data in zip(tables, ("choices", "answers"), strict=True):
        where = {"data_files": {"test": str(folder / f"{data}.jsonl")}}
        (folder / f"{table['task']}.yaml").write_text(yaml.safe_dump(common | table | {"dataset_kwargs": where}))
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("lm_eval")
    form: dict[str, Any] = yaml.safe_load((files("memopt.recipes") / "glm-5.2-int4.yaml").read_bytes())
    recipe = parse_recipe(yaml.safe_dump(form | {"gate": GATE}).encode(), "gated.yaml")
    memopt.compress(TINY_GLM5, root / "release", recipe=recipe, device="cpu")
    memopt.compress(TINY_GLM5, root / "int4", recipe="glm-5.2-int4", device="cpu")
    memopt.compress(TINY_GLM5, root / "base", recipe="copy", device="cpu")
    memopt.compress(damaged_source(root / "source"), root / "damaged", recipe="glm-5.2-int4", device="cpu")
    served = {name: signed(root / name, name) for name in ("base", "int4", "damaged")}
    lines = [f"def area_{n}(width, height):\n    return width * height + {n}\n" for n in range(8)]
    (root / "text.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (root / "key.pub").write_bytes(KEY.public_key.pem)
    return Made(root / "release", write_tasks(root / "tasks"), root / "text.jsonl", root / "key.pub", served)


def evaluate(made: Made, release: str, *more: str) -> tuple[Outcome, Server]:
    """`memopt evaluate` with the base's server and that of one of `made.served`, and what the latter saw."""
    with serving(made.served["base"], made.key) as base, serving(made.served[release], made.key) as other:
        called = invoke(
            "evaluate", TINY_GLM5, made.release, "--data", made.data, "--window", "64",
            "--task", str(made.tasks / "tiny_choices.yaml"), "--task", str(made.tasks / "tiny_answers.yaml"),
            "--base-url", base.url, "--release-url", other.url, *more,
        )  # fmt: skip
    return called, other


def points_by_hand(folder: Path, key: Path) -> float:
    """Accuracy in points: a choice's logprobs summed behind the prompt's own tokens."""
    model = ServedModel(folder, key)

    def logprob(text: str, end: str) -> float:
        num_before, ids = len(model.ids(text)), model.ids(text + end)
        rows = model.logprobs(ids)
        return sum(float(rows[place - 1, ids[place]]) for place in range(num_before, len(ids)))

    won = [logprob(f"    {name}", right) > logprob(f"    {name}", wrong) for name in NAMES for right, wrong in ENDS]
    return 100 * sum(won) / len(won)


def test_scores_of_real_runs_are_in_quality_json_report_and_gate(made: Made) -> None:
    called, server = evaluate(made, "int4")
    assert called.code == 0, called.stderr
    assert "gate holds: largest score drop, points" in called.stdout
    quality = parse_quality((made.release / "quality.json").read_bytes())
    scores = {score.task: score for score in quality.tasks}
    assert scores.keys() == {"tiny_answers", "tiny_choices"}
    choices, answers = scores["tiny_choices"], scores["tiny_answers"]
    assert (choices.metric, choices.num_samples) == ("acc,none", len(NAMES) * len(ENDS))
    assert (answers.metric, answers.num_samples, answers.base) == ("exact_match,none", len(NAMES), 100.0)
    assert (made.release / "report.html").read_text().count("tiny_choices") >= 1
    assert 60 < choices.base < 100
    assert choices.base == pytest.approx(points_by_hand(made.served["base"], made.key))
    assert choices.release == pytest.approx(points_by_hand(made.served["int4"], made.key))
    assert choices.base_error > 0
    # Token ids, so that the server adds no special tokens that lm-eval did not count.
    assert all(isinstance(token, int) for body in server.requests for prompt in body["prompt"] for token in prompt)


def test_a_model_that_lost_points_fails_the_gate_and_is_not_signed(made: Made) -> None:
    called, server = evaluate(made, "damaged", "--task-limit", "6")
    assert called.code == EXIT_GATE
    assert "largest score drop, points" in called.stderr
    scores = parse_quality((made.release / "quality.json").read_bytes()).tasks
    assert {score.num_samples for score in scores} == {6}
    assert max(score.drop for score in scores) > GATE["score_drop_max_points"]
    assert len(server.requests) == 6 * 3
    with pytest.raises(QualityGateError):
        signed(made.release, "release")
