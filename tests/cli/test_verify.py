"""`memopt verify`: exit codes, what it prints, the JSON of docs/verdict.md, the termination message, its start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from release_files import contents, policy_json
from signing_keys import fixed_key
from tiny_ranks import signed_rank_release, swap
from tiny_releases import IDENTITY, KEY, SHARDS, flip_byte, signed_release

from cli.invoke import MEMOPT, invoke
from memopt.manifests.verdict import Finding, Verdict
from memopt.manifests.verdict_json import MAX_TERMINATION_BYTES, short_json, verdict_fields

DOCS = Path(__file__).parent.parent.parent / "docs" / "verdict.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "key.pub").write_bytes(KEY.public_key.pem)
    (tmp_path / "trust.json").write_text(policy_json(min_counters={IDENTITY: 7}))
    return signed_release(tmp_path / "release")


@pytest.fixture
def key(folder: Path, tmp_path: Path) -> Path:
    return tmp_path / "key.pub"


def test_a_good_release(folder: Path, key: Path, tmp_path: Path) -> None:
    before = contents(folder)
    for trust in (("--key", key), ("--policy", tmp_path / "trust.json")):
        done = invoke("verify", folder, *trust)
        assert (done.code, done.stderr) == (0, "")
        assert done.stdout.startswith(f"verified    {IDENTITY}, counter 7")
        assert KEY.public_key.hint in done.stdout
    assert contents(folder) == before


def test_json_has_the_documented_fields(folder: Path, key: Path) -> None:
    fields = invoke("verify", folder, "--key", key, "--json").verdict
    assert (fields["schema"], fields["status"], fields["exit_code"]) == ("memopt.verify/1", "ok", 0)
    documented = DOCS.read_text()
    assert [name for name in fields if f"`{name}`" not in documented] == []
    flip_byte(folder / SHARDS[0], -1)
    refused = invoke("verify", folder, "--key", key, "--json")
    assert refused.code == 4
    finding = refused.verdict["findings"][0]
    assert (finding["file"], finding["chunk"], finding["start_bytes"]) == (SHARDS[0], 0, 0)
    assert [name for name in finding if f"`{name}`" not in documented] == []
    assert refused.verdict["code"] == finding["code"] == "MEMOPT_CONTENT"


def test_every_finding_is_a_line_and_there_is_no_success_line(folder: Path, key: Path) -> None:
    flip_byte(folder / SHARDS[0], -1)
    (folder / "bad\nname\x1b[2J").write_text("")
    done = invoke("verify", folder, "--key", key)
    assert (done.code, done.stdout) == (6, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert "MEMOPT_LAYOUT" in lines[0]
    assert "\x1b" not in done.stderr
    assert SHARDS[0] in lines[1]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        ((), 2, "no policy and no key"),
        (("--key", "{key}", "--policy", "{policy}"), 2, "exclude each other"),
        (("--key", "{gone}"), 3, "gone"),
        (("--policy", "{key}"), 8, "not strict JSON"),
        (("--key", "{policy}"), 3, "trust.json"),
        (("--key", "{key}", "--rank", "-1"), 2, "rank"),
        (("--key", "{key}", "--jobs", "0"), 2, "jobs"),
        (("--key", "{key}", "--tp", "8"), 2, "no rank is named"),
        (("--key", "{key}", "--rank", "1", "--tp", "0"), 2, "--tp"),
        (("--key", "{key}", "--rank", "1", "--tp", "8", "--ep", "8"), 2, "exclude each other"),
        (("--key", "{key}", "--rank", "1", "--ep", "8"), 2, "no rank layout ep8"),
    ],
)
def test_wrong_calls(folder: Path, key: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, word: str) -> None:
    places = {"key": key, "policy": tmp_path / "trust.json", "gone": tmp_path / "gone"}
    done = invoke("verify", folder, *(argument.format(**places) for argument in arguments))
    assert (done.code, word in done.refusal, done.stdout) == (code, True, ""), done.stderr


def test_one_rank_and_swapped_files(key: Path, tmp_path: Path) -> None:
    folder = signed_rank_release(tmp_path / "ranks", "tp2")
    swapped = [f"tp2/rank-{rank}/{SHARDS[0]}" for rank in range(2)]
    assert invoke("verify", folder, "--key", key, "--rank", "1", "--tp", "2").code == 0
    swap(*(folder / name for name in swapped))
    done = invoke("verify", folder, "--key", key, "--rank", "0", "--json")
    words = f"its bytes are those signed for {swapped[1]}: the two files were swapped"
    assert (done.code, done.verdict["file"], done.verdict["message"]) == (4, swapped[0], words)
    assert [finding["file"] for finding in done.verdict["findings"]] == swapped[:1]
    done = invoke("verify", folder, "--key", key)
    assert done.stderr.count("the two files were swapped") == 2


def test_no_such_folder(key: Path, tmp_path: Path) -> None:
    assert invoke("verify", tmp_path / "gone", "--key", key).code == 2


def test_quick_says_partial(folder: Path, key: Path) -> None:
    done = invoke("verify", folder, "--key", key, "--quick")
    assert (done.code, done.stdout.startswith("PARTIAL")) == (0, True)


def test_the_termination_message(folder: Path, key: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert invoke("verify", folder, "--key", key, "--termination-log", log).code == 0
    assert json.loads(log.read_bytes())["status"] == "ok"
    for number in range(100):
        (folder / ("x" * 200 + str(number))).write_text("")
    done = invoke("verify", folder, "--key", key, "--termination-log", log, "--json")
    message = log.read_bytes()
    assert (done.code, len(message) <= MAX_TERMINATION_BYTES) == (6, True)
    short = json.loads(message)
    assert (short["exit_code"], short["schema"]) == (6, "memopt.verify/1")
    assert short["left_out"] + len(short["findings"]) == 100
    assert invoke("verify", folder, "--termination-log", log).code == 2
    assert json.loads(log.read_bytes())["code"] == "MEMOPT_USAGE"


def test_a_message_that_cannot_be_written_changes_nothing(folder: Path, key: Path, tmp_path: Path) -> None:
    done = invoke("verify", folder, "--key", key, "--termination-log", tmp_path / "gone" / "log")
    assert (done.code, "cannot write" in done.stderr) == (0, True)


def test_a_short_verdict_of_any_size_fits() -> None:
    text = "\N{SNOWMAN}" * 5000
    verdict = Verdict(
        False,
        6,
        tuple(Finding(text, 6, text, text, text, n) for n in range(50)),
        warnings=(text,) * 50,
        identity=text,
        key_hints=("a" * 64,) * 99,
    )
    for size in (4096, 1000, 300):
        line = short_json(verdict_fields(verdict), size)
        assert len(line) <= max(size, 3000)
        assert json.loads(line)["exit_code"] == 6
    assert len(short_json(verdict_fields(verdict))) <= MAX_TERMINATION_BYTES


def test_it_starts_without_the_heavy_libraries(folder: Path, key: Path) -> None:
    script = (
        "import resource, sys\n"
        f"sys.argv = ['memopt', 'verify', {str(folder)!r}, '--key', {str(key)!r}]\n"
        "from memopt.cli.main import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "heavy = {'torch', 'numpy', 'numba', 'pydantic', 'rich', 'yaml', 'huggingface_hub', 'http', 'socket'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules, seconds = done.stdout.splitlines()[-2:]
    assert modules == "[]"
    assert float(seconds) < 1, "0.15 s here; slow machines are slow"


def test_another_key(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pub"
    other.write_bytes(fixed_key(9).public_key.pem)
    assert invoke("verify", folder, "--key", other).code == 3


def test_a_read_only_folder(folder: Path, key: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    before = os.stat(folder)
    assert invoke("verify", folder, "--key", key).code == 0
    folder.chmod(0o755)
    assert os.stat(folder).st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("command", [("verify",), ("verify", "--json"), ("exec",)])
def test_a_closed_pipe_does_not_make_a_refusal_a_success(folder: Path, key: Path, command: tuple[str, ...]) -> None:
    for number in range(2000):
        (folder / f"unlisted-{number:04d}-{'x' * 100}.json").touch()
    tail = ["--", "true"] if command[0] == "exec" else []
    arguments = [*command[:1], str(folder), *command[1:], "--key", str(key), *tail]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([MEMOPT, *arguments], stdout=write_end, stderr=write_end, timeout=60, check=False)
    finally:
        os.close(write_end)
    assert done.returncode == 6
