"""Sizes, durations, single lines, help, broken pipes: what all commands share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import TINY_GLM5

from cli.invoke import command, invoke, run_command
from memopt.cli.main import cli
from memopt.cli.output import duration_text, one_line, parse_size, refusals, size_text
from memopt.errors import ExitCode
from memopt.version import __version__

COMMANDS = ("inspect", "plan", "compress", "dequantize")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GB", 4 * 10**9), ("4GiB", 4 * 2**30), ("500MB", 5 * 10**8), ("500 MiB", 500 * 2**20), ("1.5 kb", 1500),
        ("1KiB", 1024), ("2TB", 2 * 10**12), ("17", 17), ("17B", 17), (" 1e3 MB ", 10**9), ("4gib", 4 * 2**30),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "four", "4 PB", "4G", "4 GBB", "nan", "inf", "1,000", "0x10"])
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size like 4GB or 500MiB"):
        parse_size(text)


@given(st.text())
def test_any_text_is_a_size_or_a_refusal(text: str) -> None:
    with suppress(click.BadParameter):
        assert isinstance(parse_size(text), int)


def test_sizes_are_told_in_both_units() -> None:
    assert size_text(450_888_000_000) == "419.9 GiB (450.9 GB)"
    assert size_text(13_240_632) == "12.6 MiB (13.2 MB)"
    assert size_text(1023) == "1,023 B"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.004, "0.00 s"), (0.6, "1 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.text())
def test_a_line_is_one_line_whatever_is_in_it(text: str) -> None:
    assert one_line(text).isprintable()
    assert len(one_line(text).splitlines()) <= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_claims_nothing_about_what_was_written(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, refusals("pull", as_json=False):
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    told = capsys.readouterr().err
    assert told.startswith("memopt pull: MEMOPT_INTERRUPTED: stopped before it was done")
    assert "nothing" not in told
    assert "anything" not in told


def test_a_plain_line_stays_as_it_is() -> None:
    assert one_line("größe 模型 'x' [y]") == "größe 模型 'x' [y]"


def test_help_tells_commands_and_exit_codes() -> None:
    for flag in ("--help", "-h"):
        told = invoke(flag)
        assert (told.code, told.stderr) == (0, "")
        for name in COMMANDS:
            assert f"  {name}" in told.stdout
        for code in ("0 ok", "2 usage", "4 content", "6 layout", "8 malformed", "9 unsupported", "130 interrupted"):
            assert code in " ".join(told.stdout.split())


def test_no_arguments_show_the_help() -> None:
    told = invoke()
    assert told.code == 2
    assert told.stderr.startswith("Usage: memopt ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_explains_every_option(name: str) -> None:
    told = invoke(name, "--help")
    assert (told.code, told.stderr) == (0, "")
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    assert (found.help or "").partition("\n")[0].split()[0] in told.stdout
    for option in found.params:
        if isinstance(option, click.Option):
            assert option.help, option.name
            assert max(option.opts, key=len) in told.stdout
    assert "--json" in told.stdout


def test_version() -> None:
    assert invoke("--version").stdout == f"memopt, version {__version__}\n"


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("inspect", "--help")])
def test_help_waits_for_nothing_heavy(arguments: tuple[str, ...]) -> None:
    heavy = ["torch", "numba", "numpy", "rich", "pydantic", "yaml", "huggingface_hub"]
    program = (
        "import sys; from memopt.cli.main import main\n"
        "try: main()\n"
        f"finally: print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("arguments", [("plan", TINY_GLM5, "--json"), ("plan", TINY_GLM5), ("inspect", TINY_GLM5)])
def test_a_reader_that_leaves_is_no_error(arguments: tuple[str | Path, ...]) -> None:
    """`memopt plan … | true`: quiet, and no exit code of a fault."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command(*arguments), stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_help_into_a_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command("--help"), stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert done.stderr == b""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_output_survives_a_poor_terminal(encoding: str, tmp_path: Path) -> None:
    out = tmp_path / "größe"
    made = run_command("compress", TINY_GLM5, out, env=os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C"})
    assert made.code == 0, made.stderr
    shown = run_command("plan", TINY_GLM5, "--max-file-size", "300KB", env=os.environ | {"PYTHONIOENCODING": encoding})
    assert shown.code == 0, shown.stderr


def test_a_json_verdict_is_ascii() -> None:
    raw = invoke("inspect", "größe", "--json").stdout
    assert raw.isascii()
    assert json.loads(raw)["exit_code"] == ExitCode.USAGE
