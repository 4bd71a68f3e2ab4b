"""deploy/release-job.yml: compress, sign, verify, publish, each only if the one before succeeded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from memopt.cli.main import cli

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "release-job.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[Any, Any]:
    return yaml.safe_load(FILE.read_text())


@pytest.fixture(scope="module")
def job(workflow: dict[Any, Any]) -> dict[str, Any]:
    return workflow["jobs"]["release"]


def script(job: dict[str, Any], name: str) -> str:
    (found,) = [step["run"] for step in job["steps"] if step.get("name") == name]
    return found


def test_the_steps_come_in_order(job: dict[str, Any]) -> None:
    commands = [found[1] for step in job["steps"] for found in re.finditer(r"\bmemopt (\w+)", step.get("run", ""))]
    assert commands == ["compress", "sign", "verify", "push"]
    assert not [step for step in job["steps"] if step.get("continue-on-error")]
    # Only keeping the verdicts may run after a failure.
    assert [step["name"] for step in job["steps"] if "if" in step] == ["Keep the verdicts"]


def test_a_failure_inside_a_pipe_counts(workflow: dict[Any, Any]) -> None:
    # GitHub's default shell has no pipefail; this one has.
    assert workflow["defaults"]["run"]["shell"] == "bash"


def test_only_people_start_it(workflow: dict[Any, Any]) -> None:
    # YAML 1.1 reads the key `on` as true.
    assert set(workflow[True]) == {"workflow_dispatch"}


def test_permissions_are_minimal(workflow: dict[Any, Any], job: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    assert "permissions" not in job
    assert job["environment"] == "release"


def test_actions_are_pinned_by_major_version(job: dict[str, Any]) -> None:
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert len(used) == 3
    assert all(re.fullmatch(r"actions/[a-z-]+@v[0-9]+", name) for name in used)
    (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
    assert checkout["with"]["persist-credentials"] is False


def test_secrets_reach_only_the_step_that_needs_them(workflow: dict[Any, Any], job: dict[str, Any]) -> None:
    assert "secrets." not in str(workflow.get("env")) + str(job["env"])
    needed = {
        step["name"]: re.findall(r"secrets\.(\w+)", str(step)) for step in job["steps"] if "secrets." in str(step)
    }
    assert needed == {"Sign": ["MEMOPT_SIGNING_KEY", "MEMOPT_PASSPHRASE"], "Publish": ["HF_TOKEN"]}


def test_inputs_and_secrets_are_never_pasted_into_a_script(job: dict[str, Any]) -> None:
    for step in job["steps"]:
        assert "${{" not in step.get("run", ""), step["name"]


def test_the_key_file_is_private_and_goes_away(job: dict[str, Any], tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "memopt"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nstat -c %a "$RUNNER_TEMP/release.pem"\ncat "$RUNNER_TEMP/release.pem"\nexit 3\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:/usr/bin:/bin", "RUNNER_TEMP": str(tmp_path)}
    environment |= {"MEMOPT_SIGNING_KEY": "PEM", "RELEASE": "r", "IDENTITY": "i", "COUNTER": "1"}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script(job, "Sign")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (3, ["600", "PEM"]), done.stderr
    assert not (tmp_path / "release.pem").exists()


def test_what_is_verified_and_published_is_trusted_by_the_committed_policy(job: dict[str, Any]) -> None:
    for name in ("Verify", "Publish"):
        assert '"$RELEASE"' in script(job, name)
        assert "--policy trust.json" in script(job, name)


def test_every_option_exists(job: dict[str, Any]) -> None:
    context = click.Context(cli)
    for step in job["steps"]:
        text = step.get("run", "").replace("\\\n", " ")
        for line in filter(lambda line: line.strip().startswith("memopt "), text.splitlines()):
            words = line.partition("|")[0].split()
            command = cli.get_command(context, words[1])
            assert command is not None, words[1]
            known = {name for parameter in command.params for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= known, line
