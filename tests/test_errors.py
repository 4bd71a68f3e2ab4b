"""The hierarchy of errors: stable codes, exit codes, and messages that name the place."""

from __future__ import annotations

import pytest

from memopt import errors
from memopt.errors import ExitCode, MemoptError

# Code -> exit code. These never change between versions; new ones may be added.
CODES = {
    "MEMOPT_INTERNAL": 1,
    "MEMOPT_USAGE": 2,
    "MEMOPT_RECIPE": 2,
    "MEMOPT_ALIGNMENT": 2,
    "MEMOPT_CAPACITY": 2,
    "MEMOPT_LINT": 2,
    "MEMOPT_OUTPUT": 2,
    "MEMOPT_PAGE": 1,
    "MEMOPT_CONTENT": 4,
    "MEMOPT_NONFINITE": 4,
    "MEMOPT_SIZE_MISMATCH": 4,
    "MEMOPT_SOURCE_CHANGED": 4,
    "MEMOPT_LAYOUT": 6,
    "MEMOPT_MISSING_FILE": 6,
    "MEMOPT_MISSING_TENSOR": 6,
    "MEMOPT_UNKNOWN_TENSOR": 6,
    "MEMOPT_IO": 7,
    "MEMOPT_DISK_FULL": 7,
    "MEMOPT_NETWORK": 7,
    "MEMOPT_PEER": 7,
    "MEMOPT_INTERRUPTED": 130,
    "MEMOPT_MALFORMED": 8,
    "MEMOPT_HEADER": 8,
    "MEMOPT_TRUNCATED": 8,
    "MEMOPT_LFS_POINTER": 8,
    "MEMOPT_INDEX": 8,
    "MEMOPT_CONFIG": 8,
    "MEMOPT_SHAPE": 8,
    "MEMOPT_HAND_OVER": 8,
    "MEMOPT_UNSUPPORTED": 9,
}


def all_errors() -> list[type[MemoptError]]:
    return [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, MemoptError)]


def test_codes_and_exit_codes_are_stable() -> None:
    found = {error.code: int(error.exit_code) for error in all_errors()}
    assert {code: found.get(code) for code in CODES} == CODES


def test_every_class_has_a_code_of_its_own_and_an_explanation() -> None:
    codes = [error.code for error in all_errors()]
    assert len(set(codes)) == len(codes)
    assert all(code.startswith("MEMOPT_") and code == code.upper() for code in codes)
    assert all(error.__doc__ for error in all_errors())


def test_exit_codes_are_the_documented_ones() -> None:
    documented = {
        "OK": 0, "INTERNAL": 1, "USAGE": 2, "SIGNATURE": 3, "CONTENT": 4, "POLICY": 5, "LAYOUT": 6, "IO": 7,
        "MALFORMED": 8, "UNSUPPORTED": 9, "INTERRUPTED": 130,
    }  # fmt: skip
    assert {code.name: int(code) for code in ExitCode} == documented


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.code)
def test_a_subclass_exits_as_its_kind_unless_it_is_an_interruption(error: type[MemoptError]) -> None:
    parent = error.__mro__[1]
    if parent is not MemoptError and issubclass(parent, MemoptError) and error.code != "MEMOPT_INTERRUPTED":
        assert error.exit_code == parent.exit_code


def test_the_text_names_file_tensor_fault_and_remedy() -> None:
    problem = errors.ShapeError("is flat", remedy="fetch it again", tensor="lm_head.weight", file="a.safetensors")
    assert str(problem) == "a.safetensors: lm_head.weight: is flat (fetch it again)"
    assert (problem.message, problem.remedy, problem.tensor, problem.file) == (
        "is flat",
        "fetch it again",
        "lm_head.weight",
        "a.safetensors",
    )


def test_a_place_that_the_message_names_is_not_said_twice() -> None:
    assert str(errors.LayoutError("there is no a.bin in /x", file="a.bin")) == "there is no a.bin in /x"
    assert str(errors.LayoutError("is a folder", file="a.bin")) == "a.bin: is a folder"
    assert str(errors.LayoutError("is a folder")) == "is a folder"
