"""deploy/entrypoint.sh with the real `memopt` command: the server starts on a good release, and on no other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cli.invoke import MEMOPT
from release_files import contents, policy_json
from signing_keys import fixed_key
from tiny_releases import CREATED, IDENTITY, SHARDS, flip_byte, sign, signed_release

SCRIPT = Path(__file__).parents[2] / "deploy" / "entrypoint.sh"


@dataclass(frozen=True)
class Pod:
    """A release, a policy and a writable folder, as a container sees them."""

    release: Path
    policy: Path
    scratch: Path

    @property
    def marker(self) -> Path:
        """Made by the server when it starts."""
        return self.scratch / "started"

    def environment(self, **changes: str) -> dict[str, str]:
        return {
            "PATH": f"{MEMOPT.parent}:/usr/bin:/bin",
            "MEMOPT_RELEASE": str(self.release),
            "MEMOPT_POLICY": str(self.policy),
            "MEMOPT_JOBS": "1",
            **changes,
        }

    def run(self, *command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """The script to its end, with a server that leaves a marker and exits with 42 if no other is named."""
        server = command or ("sh", "-c", f"echo serving > {self.marker}; exit 42")
        return subprocess.run(
            [SCRIPT, *server], env=self.environment(**changes), capture_output=True, text=True, timeout=60, check=False
        )


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    policy = tmp_path / "trust.json"
    policy.write_text(policy_json(identity=IDENTITY))
    return Pod(signed_release(tmp_path / "release", rows=256), policy, scratch)


def test_a_good_release_is_served(pod: Pod) -> None:
    before = contents(pod.release)
    done = pod.run()
    assert (done.returncode, pod.marker.exists()) == (42, True), done.stderr
    assert contents(pod.release) == before


def _flip(pod: Pod) -> None:
    flip_byte(pod.release / SHARDS[1], -20_000)


def _unlisted(pod: Pod) -> None:
    (pod.release / "modeling_x.py").write_text("print()")


def _wrong_key(pod: Pod) -> None:
    sign(pod.release, fixed_key(2))


def _expired(pod: Pod) -> None:
    sign(pod.release, not_after=CREATED + 1)


def _missing_signature(pod: Pod) -> None:
    (pod.release / "model.sig").unlink()


@pytest.mark.parametrize(
    ("spoil", "code", "word"),
    [
        (_flip, 4, SHARDS[1]),
        (_unlisted, 6, "modeling_x.py"),
        (_wrong_key, 3, "key"),
        (_expired, 5, "expired"),
        (_missing_signature, 8, "not signed"),
    ],
    ids=["flip", "unlisted", "wrong key", "expired", "missing signature"],
)
@pytest.mark.parametrize("stage", [False, True], ids=["in place", "staged"])
def test_a_bad_release_is_not_served(pod: Pod, spoil: Callable[[Pod], None], code: int, word: str, stage: bool) -> None:
    spoil(pod)
    command = ("sh", "-c", f"echo serving > {pod.marker}", "{}")
    done = pod.run(*command, **({"MEMOPT_STAGE": str(pod.scratch / "copy")} if stage else {}))
    assert done.returncode == code, done.stderr
    assert word in done.stderr
    assert not pod.marker.exists()
    assert list(pod.scratch.iterdir()) == []
    assert "Traceback" not in done.stderr


def test_a_staged_copy_is_what_is_served(pod: Pod) -> None:
    copy = pod.scratch / "copy"
    done = pod.run("sh", "-c", f'echo "$1" > {pod.marker}', "server", "{}", MEMOPT_STAGE=str(copy))
    assert done.returncode == 0, done.stderr
    assert pod.marker.read_text() == f"{copy}\n"
    assert contents(copy) == contents(pod.release)
    assert copy.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["MEMOPT_RELEASE", "MEMOPT_POLICY"])
def test_a_missing_variable_is_a_usage_error(pod: Pod, name: str) -> None:
    done = pod.run(**{name: ""})
    assert (done.returncode, name in done.stderr, pod.marker.exists()) == (2, True, False)


def test_no_command_is_a_usage_error(pod: Pod) -> None:
    done = subprocess.run([SCRIPT], env=pod.environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "no command" in done.stderr) == (2, True)


def test_a_missing_policy_file_is_a_refusal(pod: Pod) -> None:
    pod.policy.unlink()
    done = pod.run()
    assert done.returncode not in {0, 42}
    assert not pod.marker.exists()


def test_the_server_takes_the_place_of_the_script(pod: Pod) -> None:
    """Same process: signals reach the server, and nothing of memopt stays in memory."""
    server = f"echo $$ > {pod.marker}; exec sleep 60"
    process = subprocess.Popen(
        [SCRIPT, "sh", "-c", server], env=pod.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 30
        while not (pod.marker.exists() and pod.marker.read_text()):
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        assert int(pod.marker.read_text()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == -signal.SIGTERM
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_the_script_is_plain_and_executable() -> None:
    assert os.access(SCRIPT, os.X_OK)
    assert SCRIPT.read_text().startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n", SCRIPT], check=False).returncode == 0
