"""The process that renders templates: bounded in time and memory, and alive again after it was ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from refusals import refusal, within_seconds

from memopt.errors import MemoptIOError, UnsupportedError, UsageError
from memopt.runtime.text.template_limits import TemplateLimits
from memopt.runtime.text.template_process import TemplateProcess

FILE = "chat_template.jinja"
# Both take minutes: many steps, and one long step after another.
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
COPIES = "{{ ('a' * 99999) | replace('a', 'b' * 999) | length }}" * 99


def limited(seconds: float) -> Iterator[TemplateProcess]:
    process = TemplateProcess(TemplateLimits(seconds, memory_bytes=1 << 28, max_characters=1 << 16))
    with within_seconds(120):
        yield process
    process.close()


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    # A loaded machine may take seconds for what takes milliseconds.
    yield from limited(60)


@pytest.fixture
def hasty_process() -> Iterator[TemplateProcess]:
    yield from limited(1)


def wait_for_end(child: int) -> None:
    """Until os.kill or open raises, or the child is a zombie whose new parent has not looked yet."""
    while True:
        os.kill(child, 0)
        with open(f"/proc/{child}/stat") as status:
            if status.read().split()[2] == "Z":
                raise ProcessLookupError
        time.sleep(0.01)


def child_of(process: TemplateProcess) -> int:
    assert process._process is not None
    return process._process.pid


def test_one_process_renders_all(process: TemplateProcess) -> None:
    assert process.render("{{ a }}\n{{ b[0] }}", {"a": "x\n漢", "b": ["é"]}, FILE) == "x\n漢\né"
    first = child_of(process)
    assert process.render("{{ a }}", {"a": 2}, FILE) == "2"
    assert child_of(process) == first


def test_a_refusal_leaves_it_running(process: TemplateProcess) -> None:
    with refusal(UsageError, FILE, "roles must alternate"):
        process.render("{{ raise_exception('roles must alternate') }}", {}, FILE)
    first = child_of(process)
    with refusal(UsageError, "Expected an expression"):
        process.render("{% if %}", {}, FILE)
    with refusal(UsageError, "ZeroDivisionError"):
        process.render("{{ 1 / 0 }}", {}, FILE)
    with refusal(UsageError, "without end"):
        process.render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {}, FILE)
    with refusal(UsageError, "nested blocks"):
        process.render("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, {}, FILE)
    with refusal(UsageError, "at least one item"):
        process.render("{{ cycler() }}", {}, FILE)
    with refusal(UsageError, "AssertionError"):
        process.render("{{ 'abc' | truncate(1, true, '......') }}", {}, FILE)
    with refusal(UsageError, "65,536 characters"):
        process.render("{% for i in range(99999) %}{{ i }}{% endfor %}", {}, FILE)
    assert process.render("ok", {}, FILE) == "ok"
    assert child_of(process) == first


@pytest.mark.parametrize("source", [LOOP, COPIES], ids=["loop", "copies"])
def test_a_template_without_end_is_ended(hasty_process: TemplateProcess, source: str) -> None:
    with refusal(UnsupportedError, FILE, "more than 1 s", "plain prompt"):
        hasty_process.render(source, {}, FILE)
    assert hasty_process.render("ok", {}, FILE) == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'a' | center(999999999) }}",
    ],
)
def test_a_template_that_eats_memory_is_refused(process: TemplateProcess, source: str) -> None:
    with refusal(UsageError, FILE, "memory"):
        process.render(source, {}, FILE)
    assert process.render("ok", {}, FILE) == "ok"


def test_a_conversation_too_long_for_its_memory_is_refused() -> None:
    process = TemplateProcess(TemplateLimits(max_request_bytes=1000))
    with refusal(UsageError, FILE, "1,000 are rendered", "shorten"):
        process.render("{{ a }}", {"a": "x" * 1000}, FILE)
    assert process._process is None


def test_it_starts_again_after_it_was_killed(process: TemplateProcess) -> None:
    assert process.render("ok", {}, FILE) == "ok"
    os.kill(child_of(process), signal.SIGKILL)
    with refusal(MemoptIOError, "ended with -9"):
        process.render("ok", {}, FILE)
    assert process.render("again", {}, FILE) == "again"


def test_closing_ends_it_and_is_not_final(process: TemplateProcess) -> None:
    process.render("ok", {}, FILE)
    child = child_of(process)
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert process.render("ok", {}, FILE) == "ok"


def test_it_does_not_outlive_whoever_asked() -> None:
    code = (
        "import os; from memopt.runtime.text.template_process import TemplateProcess as P\n"
        "p = P(); p.render('ok', {}, 'f'); print(p._process.pid, flush=True); os._exit(0)"
    )
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60).stdout)
    with within_seconds(30), pytest.raises((ProcessLookupError, FileNotFoundError)):
        wait_for_end(child)


def test_the_folder_it_is_started_in_gives_no_modules(
    process: TemplateProcess, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.path.join(tmp_path, "jinja2.py"), "w") as file:
        file.write("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    assert process.render("ok", {}, FILE) == "ok"
