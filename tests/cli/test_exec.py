"""`memopt exec`: CMD takes over only after a verification; on failure it never starts."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from tiny_ranks import write_rank_release
from tiny_releases import CREATED, IDENTITY, KEY, SHARDS, flip_byte, sign, signed_release

from cli.invoke import Outcome, run_command
from memopt.cli.exec import served_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "key.pub").write_bytes(KEY.public_key.pem)
    return signed_release(tmp_path / "release")


def run(folder: Path, *arguments: str | Path) -> Outcome:
    return run_command("exec", folder, "--key", folder.parent / "key.pub", *arguments)


def test_the_command_takes_over(folder: Path) -> None:
    code = "import os, sys; print(sys.argv[1:], os.getppid()); sys.exit(42)"
    done = run(folder, "--", sys.executable, "-c", code, "{}", "--port", "80", "--model={}", '{"a": {}}')
    assert done.code == 42
    expected = [str(folder), "--port", "80", f"--model={folder}", '{"a": {}}']
    assert done.stdout == f"{expected} {os.getpid()}\n"
    assert f"verified    {IDENTITY}" in done.stderr


def test_signals_are_as_a_shell_leaves_them(folder: Path) -> None:
    done = run(folder, "--", "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[-1], 16)
    for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGINT, signal.SIGXFSZ):
        assert not ignored & (1 << (number - 1)), number


@pytest.mark.parametrize("stage", [False, True])
def test_a_bad_release_never_starts_it(folder: Path, tmp_path: Path, stage: bool) -> None:
    flip_byte(folder / SHARDS[1], -1)
    dest = ("--stage", tmp_path / "staged") if stage else ()
    log = tmp_path / "log"
    done = run(folder, *dest, "--termination-log", log, "--", "touch", tmp_path / "started", "{}")
    assert (done.code, done.stdout) == (4, "")
    assert "MEMOPT_CONTENT" in done.stderr
    assert SHARDS[1] in done.stderr
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "staged").exists()
    assert b'"exit_code":4' in log.read_bytes()


def test_a_staged_copy_is_served(folder: Path, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    for _ in range(2):  # the second run finds its own copy, as after a restart
        done = run(folder, "--stage", staged, "--", "ls", "{}")
        assert done.code == 0, done.stderr
        assert done.stdout.split() == sorted(path.name for path in folder.iterdir())
    assert done.stdout == run(folder, "--stage", staged, "--", "ls", folder).stdout
    flip_byte_forced(staged / SHARDS[0])
    assert run(folder, "--stage", staged, "--", "ls", "{}").code == 4


def flip_byte_forced(path: Path) -> None:
    path.chmod(0o600)
    flip_byte(path, -1)


def test_a_copy_of_another_release_or_an_open_folder_is_not_served(folder: Path, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    assert run(folder, "--stage", staged, "--", "true", "{}").code == 0
    sign(folder, counter=8, created=CREATED + 1)
    done = run(folder, "--stage", staged, "--", "touch", tmp_path / "started", "{}")
    assert (done.code, "another release" in done.stderr) == (2, True)
    sign(folder)
    assert run(folder, "--stage", staged, "--", "true", "{}").code == 0
    staged.chmod(0o755)
    done = run(folder, "--stage", staged, "--", "touch", tmp_path / "started", "{}")
    assert (done.code, "no private copy" in done.stderr) == (2, True)
    assert not (tmp_path / "started").exists()


def test_one_rank_of_one_of_two_layouts(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_bytes(KEY.public_key.pem)
    folder = write_rank_release(tmp_path / "release", "tp2")
    shutil.move(write_rank_release(tmp_path / "other", "ep2") / "ep2", folder / "ep2")
    sign(folder)
    staged = tmp_path / "staged"
    for _ in range(2):
        # The second time the copy is verified, and served again.
        done = run(folder, "--stage", staged, "--rank", "1", "--ep", "2", "--", "ls", "{}")
        assert (done.code, "ep2" in done.stdout, "tp2" in done.stdout) == (0, True, False), done.stderr
    assert [path.name for path in (staged / "ep2").iterdir()] == ["rank-1"]
    done = run(
        folder, "--stage", tmp_path / "more", "--rank", "1", "--tp", "4", "--", "touch", tmp_path / "started", "{}"
    )
    assert (done.code, "tp4" in done.stderr, (tmp_path / "started").exists()) == (2, True, False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--",), "Missing argument"),
        (("--", "no-such-command-anywhere"), "no command"),
        (("--stage", "{tmp}/staged", "--", "ls"), "does not name the copy"),
        (("--policy", "{tmp}/key.pub", "--", "ls"), "exclude each other"),
        (("--tp", "2", "--", "ls", "{{}}"), "no rank is named"),
    ],
)
def test_wrong_calls(folder: Path, tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    done = run(folder, *(argument.format(tmp=tmp_path) for argument in arguments))
    assert (done.code, word in done.stderr, done.stdout) == (2, True, ""), done.stderr
    assert not (tmp_path / "staged").exists()


def test_no_trust_no_command(folder: Path) -> None:
    assert run_command("exec", folder, "--", "echo", "started").code == 2


def test_what_is_replaced() -> None:
    command = ("serve", "{}", "DIR", "--m={}", "x{}", "{}x", '{"a":{}}', "DIR/x")
    expected = ["serve", "/s", "/s", "--m=/s", "x{}", "{}x", '{"a":{}}', "DIR/x"]
    assert served_command(command, "DIR", "/s") == expected
    assert served_command(("DIR", "x"), "DIR", "/s") == ["DIR", "x"]
    # The unverified original never stands beside the copy under another spelling.
    assert served_command(("x", "--model=DIR", "--model=DIR2"), "DIR", "/s") == ["x", "--model=/s", "--model=DIR2"]
