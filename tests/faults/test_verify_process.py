"""Rows 51 to 53 and 56: `memopt verify` as a process that is killed, short of memory or has nowhere to write."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli.invoke import command, run_command
from release_files import contents
from tiny_releases import KEY, POLICY, SHARDS, add_zeros, sign_anyway, signed_release

from memopt.manifests.release import open_release
from memopt.manifests.verify import verify_release

GIB = 2**30
# Zeros that need a minute to be hashed and no space.
ENDLESS = 64 * GIB


@pytest.fixture(scope="module")
def public_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key.pub"
    path.write_bytes(KEY.public_key.pem)
    return path


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_zeros(signed_release(tmp_path_factory.mktemp("endless") / "release"), "zeros.bin", ENDLESS)


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """What would show that anything was written: sizes, times of change, modes, of files and folders."""
    paths = [folder, *folder.rglob("*")]
    stats = {str(path): path.lstat() for path in paths}
    return {name: (s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_mode, s.st_ino) for name, s in stats.items()}


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """A process that is well within its hashing."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    end = time.monotonic() + 30
    while _read_bytes(process.pid) < 64 * 2**20 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()
    return process


def _read_bytes(pid: int) -> int:
    """Bytes that the process has read by now."""
    try:
        fields = Path(f"/proc/{pid}/io").read_text().split()
    except OSError:
        return 0
    return int(fields[fields.index("rchar:") + 1])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("flags", [(), ("--json",), ("--jobs", "1")])
def test_56_stopped_midway(
    endless: Path, public_key: Path, tmp_path: Path, number: int, code: int, flags: tuple[str, ...]
) -> None:
    log = tmp_path / "termination-log"
    process = started(command("verify", endless, "--key", public_key, "--termination-log", log, *flags))
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in stderr
    for text in (stdout, stderr, log.read_text() if log.exists() else ""):
        assert "verified" not in text
        assert '"ok"' not in text
    if "--json" in flags:
        assert json.loads(stdout)["status"] == "refused"
    else:
        assert stdout == ""


@pytest.mark.parametrize("jobs", [1, 3])
def test_56_a_program_that_opens_a_release_is_stopped(endless: Path, public_key: Path, jobs: int) -> None:
    """Ctrl-C reaches the caller at once, from all threads, and nothing is opened."""
    code = (
        "import sys, memopt; memopt.open_release(sys.argv[1], key=sys.argv[2], jobs=int(sys.argv[3])); print('opened')"
    )
    process = started([sys.executable, "-c", code, str(endless), str(public_key), str(jobs)])
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode != 0
    assert stdout == ""
    assert stderr.rstrip().endswith("KeyboardInterrupt")


def test_51_killed_and_started_again(endless: Path, public_key: Path) -> None:
    """Nothing was left behind, so nothing is trusted the next time: a change in between is seen."""
    before = snapshot(endless)
    process = started(command("verify", endless, "--key", public_key))
    process.kill()
    stdout, _ = process.communicate(timeout=20)
    assert (process.returncode, stdout) == (-signal.SIGKILL, "")
    assert snapshot(endless) == before
    os.truncate(endless / "zeros.bin", ENDLESS - 1)
    outcome = run_command("verify", endless, "--key", public_key)
    os.truncate(endless / "zeros.bin", ENDLESS)
    assert outcome.code == 4
    assert "zeros.bin" in outcome.stderr


def test_52_nowhere_to_write(tmp_path: Path, public_key: Path) -> None:
    """No temporary folder, no home, no file may grow by a byte; the release is read-only and stays as it was."""
    folder = signed_release(tmp_path / "release")
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = snapshot(folder)
    environment = {"PATH": os.environ["PATH"], "TMPDIR": "/nonexistent", "HOME": "/nonexistent"}
    outcome = run_command(
        "verify",
        folder,
        "--key",
        public_key,
        env=environment,
        cwd="/",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
    )
    assert outcome.code == 0, outcome.stderr
    assert "verified    " in outcome.stdout
    assert snapshot(folder) == before
    with open_release(folder, policy=POLICY) as release:
        release.load()
    assert snapshot(folder) == before


def test_52_a_full_disk_for_the_verdict(tmp_path: Path, public_key: Path) -> None:
    """The verdict cannot be written: that is said, and the exit code is still the release's own."""
    folder = signed_release(tmp_path / "release")
    for expected, bend in ((0, None), (4, SHARDS[0])):
        if bend is not None:
            os.truncate(folder / bend, 10)
        outcome = run_command("verify", folder, "--key", public_key, "--termination-log", "/dev/full")
        assert outcome.code == expected


# A small process between: a child's peak counts from its fork on, and this one is full of torch.
_MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True, check=False)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([done.returncode, peak, done.stdout]))
"""


def run_and_measure(*arguments: str | Path) -> tuple[int, int, str]:
    """(exit code, peak memory in bytes, standard output) of the command."""
    measure = [sys.executable, "-S", "-c", _MEASURE, *command(*arguments)]
    done = subprocess.run(measure, capture_output=True, text=True, timeout=300, check=True)
    code, peak, stdout = json.loads(done.stdout)
    return code, peak, stdout


@pytest.mark.parametrize("jobs", ["1", "4"])
def test_53_a_large_file_needs_little_memory(tmp_path: Path, public_key: Path, jobs: str) -> None:
    folder = add_zeros(signed_release(tmp_path / "release"), "zeros.bin", GIB // 2)
    code, peak, stdout = run_and_measure("verify", folder, "--key", public_key, "--jobs", jobs)
    assert code == 0
    assert "verified    " in stdout
    assert peak < 150 * 2**20


@pytest.mark.slow
def test_53_a_60_gb_file(tmp_path: Path, public_key: Path) -> None:
    folder = add_zeros(signed_release(tmp_path / "release"), "zeros.bin", 60 * 10**9 // 2**22 * 2**22)
    code, peak, _ = run_and_measure("verify", folder, "--key", public_key)
    assert code == 0
    assert peak < 150 * 2**20


def test_53_many_files(tmp_path: Path, public_key: Path) -> None:
    check_many_files(tmp_path, public_key, 3000, 150 * 2**20)


@pytest.mark.slow
def test_53_100_000_files(tmp_path: Path, public_key: Path) -> None:
    check_many_files(tmp_path, public_key, 100_000, 600 * 2**20)


def check_many_files(tmp_path: Path, public_key: Path, count: int, max_peak: int) -> None:
    folder = signed_release(tmp_path / "release")
    for number in range(count):
        part = folder / f"part-{number // 1000}"
        part.mkdir(exist_ok=True)
        (part / f"file-{number}.txt").write_text(str(number))
    sign_anyway(folder)
    code, peak, stdout = run_and_measure("verify", folder, "--key", public_key, "--json")
    verdict = json.loads(stdout)
    assert (code, verdict["verified_files"]) == (0, len(contents(folder)) - 1)
    assert peak < max_peak
    (folder / "part-1" / "file-1500.txt").write_text("other")
    assert verify_release(folder, POLICY).exit_code == 4
