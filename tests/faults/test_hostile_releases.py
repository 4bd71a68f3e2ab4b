"""Every row of the table of hostile inputs (docs/threat-model.md) that is a file on disk, three ways, one answer.

Rows 46 to 49 (races) are in test_loader_races.py, rows 51 to 56 (processes) in test_verify_process.py.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_releases import FEW_BYTES, THREE_CHUNKS, signed_release

from faults import hostile_files, hostile_ranks, hostile_signatures, hostile_weights
from faults.hostile_case import Case, run_everywhere

CASES = (*hostile_files.CASES, *hostile_signatures.CASES, *hostile_weights.CASES, *hostile_ranks.CASES)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A small signed release, and one with shards of three chunks (key True)."""
    folder = tmp_path_factory.mktemp("originals")
    return {
        False: signed_release(folder / "small", rows=FEW_BYTES),
        True: signed_release(folder / "big", rows=THREE_CHUNKS),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row(case: Case, originals: dict[bool, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(originals[case.is_big], tmp_path / "release")
    folder = case.make(folder) or folder
    policy = tmp_path / "trust.json"
    policy.write_text(case.policy(folder))
    outcomes = run_everywhere(case, folder, policy)
    told = outcomes.command.stdout + outcomes.command.stderr
    assert outcomes.codes == dict.fromkeys(outcomes.codes, case.code), (told, outcomes.loader_error)
    assert "Traceback" not in told
    assert ("verified    " in outcomes.command.stdout) == (case.code == 0 and case.rank is None)
    # A hostile name cannot break a line, or hide one.
    assert all(character.isprintable() or character == "\n" for character in told)
    for word in case.words:
        assert word in told
    if case.code:
        assert outcomes.command.stdout == ""
        assert outcomes.loader_error is not None
        lines = outcomes.command.stderr.splitlines()
        assert all(line.startswith("memopt verify: MEMOPT_") for line in lines)


def test_every_row_is_here() -> None:
    rows = {case.row for case in CASES}
    assert rows == {*range(1, 6), *range(7, 28), *range(29, 33), *range(34, 40), 41, 42, 43, 54, 57}
