"""deploy/Dockerfile: the verifier's image holds click and cryptography beside memopt, and that is enough."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from release_files import policy_json
from tiny_releases import SHARDS, flip_byte, signed_release

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Dockerfile"
FOLDERS = ("memopt", "compressor", "kernels", "manifests", "recipes", "runtime")
# What `pip install --no-deps memopt click cryptography cffi pycparser` puts on the path.
INSTALLED = ("click", "cryptography", "cffi", "pycparser", "_cffi_backend*")

Verifier = Callable[..., subprocess.CompletedProcess[str]]


def stages() -> dict[str, str]:
    """The text of every stage, by its name."""
    parts = re.split(r"^FROM \S+ AS (\w+)$", FILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    """`memopt …` by a Python that finds those packages and no others."""
    site = tmp_path_factory.mktemp("site")
    for folder in FOLDERS:
        target = site / "memopt" if folder == "memopt" else site / "memopt" / folder
        shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    here = Path(sysconfig.get_path("purelib"))
    for pattern in INSTALLED:
        for path in here.glob(pattern):
            (site / path.name).symlink_to(path)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); from memopt.cli.main import main; main()"

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        # -I -S: neither the virtual environment nor the current folder is on the path.
        command = [sys.executable, "-I", "-S", "-B", "-c", code, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_it_verifies_without_torch_and_numpy(verifier: Verifier, tmp_path: Path) -> None:
    release = signed_release(tmp_path / "release", rows=64)
    policy = tmp_path / "trust.json"
    policy.write_text(policy_json())
    done = verifier("verify", release, "--policy", policy)
    assert done.returncode == 0, done.stderr
    done = verifier("exec", release, "--policy", policy, "--", "echo", "serving {}")
    assert (done.returncode, "serving" in done.stdout) == (0, True), done.stderr
    done = verifier("exec", release, "--policy", policy, "--stage", tmp_path / "copy", "--", "ls", "{}")
    assert (done.returncode, SHARDS[0] in done.stdout) == (0, True), done.stderr
    flip_byte(release / SHARDS[0], -1)
    done = verifier("verify", release, "--policy", policy, "--json")
    assert (done.returncode, SHARDS[0] in done.stdout) == (4, True), done.stderr


def test_what_it_lacks_is_said_in_one_line(verifier: Verifier, tmp_path: Path) -> None:
    policy = tmp_path / "trust.json"
    policy.write_text(policy_json())
    done = verifier("pull", "org/tiny", tmp_path / "x", "--policy", policy)
    assert (done.returncode, "no Python package huggingface_hub" in done.stderr) == (9, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_folders_and_packages_are_those_of_the_dockerfile() -> None:
    wheels = stages()["wheels"]
    copied = set(re.findall(r"^COPY (\w+) \./\1$", wheels, flags=re.MULTILINE))
    assert copied == set(FOLDERS)
    assert copied == {path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"}
    assert "pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ." in wheels
    assert "-c constraints.txt click cryptography" in wheels


def test_the_images_are_slim_and_not_root() -> None:
    text = FILE.read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.\d+-slim$", text, flags=re.MULTILINE)
    assert ":latest" not in text.replace("SERVER_IMAGE", "")
    for name in ("verifier", "server"):
        instructions = [line for line in stages()[name].splitlines() if re.match(r"(USER|ENTRYPOINT|CMD)\b", line)]
        assert [line for line in instructions if line.startswith("USER")][-1] == "USER 65532:65532"
        assert "--no-index" in stages()[name]
    assert 'ENTRYPOINT ["memopt"]' in stages()["verifier"]
    assert 'ENTRYPOINT ["memopt-entrypoint"]' in stages()["server"]
    assert all("deploy/entrypoint.sh" in stages()[name] for name in ("verifier", "server"))
    assert not re.search(r"(?i)^(ARG|ENV) .*(token|secret|passphrase|key)", text, flags=re.MULTILINE)
