"""What `memopt generate` prints, and what it takes for a prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from refusals import assert_refusal, refusal

from memopt.cli.generate import generate_command, write_whole
from memopt.cli.generate_output import failure_of, shown
from memopt.cli.generate_prompts import PromptArguments, gather_prompts
from memopt.errors import CapacityError, ContentError, MemoptError, MemoptIOError, NonFiniteError, UsageError
from memopt.runtime.text.tokenizer import MAX_PROMPT_BYTES


def arguments(
    *, prompts: Sequence[str] = (), files: Sequence[str] = (), ids: Sequence[str] = (), chats: Sequence[str] = (),
    system: str | None = None,
) -> PromptArguments:  # fmt: skip
    return PromptArguments(tuple(prompts), tuple(files), tuple(ids), tuple(chats), system)


def test_prompts_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes("é\r\n".encode())
    asked = arguments(prompts=["a", ""], files=[str(tmp_path / "p")], ids=["1, 2,3"], chats=["hi"], system="s")
    assert gather_prompts(asked) == [
        "a",
        "",
        "é\r\n",
        [1, 2, 3],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}],
    ]


@pytest.mark.parametrize("ids", ["", "1,", "a", "-1", "1.5", "1 2", "12345678901", "１"])
def test_ids_that_are_no_numbers(ids: str) -> None:
    with refusal(UsageError, "no list of numbers"):
        gather_prompts(arguments(ids=[ids]))


def test_what_is_no_prompt(tmp_path: Path) -> None:
    with refusal(UsageError, "there is no prompt"):
        gather_prompts(arguments())
    with refusal(UsageError, "--system", "--chat"):
        gather_prompts(arguments(prompts=["a"], system="s"))
    with refusal(MemoptIOError, "nowhere"):
        gather_prompts(arguments(files=[str(tmp_path / "nowhere")]))
    (tmp_path / "latin").write_bytes(b"ab\xe9")
    with refusal(UsageError, "latin", "byte 2"):
        gather_prompts(arguments(files=[str(tmp_path / "latin")]))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_PROMPT_BYTES + 1)
    with refusal(UsageError, "large", "16,777,216"):
        gather_prompts(arguments(files=[str(tmp_path / "large")]))


@pytest.mark.parametrize(
    ("ends", "error", "words"),
    [
        (["stop", "page_mismatch", "page_mismatch"], ContentError, ("2 of 3", "page")),
        (["nonfinite", "length"], NonFiniteError, ("1 of 2", "--dtype float32")),
        (["capacity"], CapacityError, ("quarantined",)),
    ],
)
def test_a_fault_is_the_commands_end(ends: list[str | None], error: type[MemoptError], words: tuple[str, ...]) -> None:
    failure = failure_of(ends)
    assert failure is not None
    assert_refusal(failure, error, *words)


def test_other_ends_are_no_fault() -> None:
    assert failure_of(["stop", "length", "abort"]) is None


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_not_ruled_by_an_answer(is_terminal: bool) -> None:
    text = "a\x1b[2J\x07b\n\té\u200d\x9b"
    with mock.patch.object(sys.stdout, "isatty", return_value=is_terminal):
        assert shown(text) == ("a\\x1b[2J\\x07b\n\té\u200d\\x9b" if is_terminal else text)


def test_every_option_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runtime.md").read_text()
    options = [name for parameter in generate_command.params for name in parameter.opts if name.startswith("--")]
    assert len(options) > 20
    assert [name for name in options if f"`{name}`" not in page] == []


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("old")
    write_whole(tmp_path / "m", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").read_text() == "new"
    with refusal(MemoptIOError, "nowhere"):
        write_whole(tmp_path / "nowhere" / "m", "new")
