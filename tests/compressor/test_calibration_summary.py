"""What the end of `memopt compress` says of calibrated weights, from the ledger's lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memopt.compressor.calibration_summary import CalibrationSummary, calibration_by_role
from memopt.errors import LedgerError


def line(role: str, **error: Any) -> bytes:
    return json.dumps({"tensor": "t", "role": role, "error": error or None}).encode() + b"\n"


def figures(tokens: int, error: float, plain: float, fallback: float = 0.0) -> dict[str, float]:
    return {"tokens": float(tokens), "calibrated_error": error, "plain_error": plain, "fallback": fallback}


def test_means_counts_and_fewest_tokens_by_role() -> None:
    lines = [
        line("routed_expert", **figures(300, 0.25, 0.5)),
        line("routed_expert", **figures(40, 0.75, 1.0, fallback=1.0)),
        line("shared_expert", **figures(2048, 0.5, 0.5)),
        line("router"),
        line("attention", relative_mse=0.1),
    ]
    assert calibration_by_role(lines) == {
        "routed_expert": CalibrationSummary(2, 1, 40, 0.5, 0.75),
        "shared_expert": CalibrationSummary(1, 0, 2048, 0.5, 0.5),
    }


def test_no_calibrated_weight_gives_no_role() -> None:
    assert calibration_by_role([line("routed_expert", relative_mse=0.1)]) == {}


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"[]\n",
        line("a", calibrated_error="x", tokens=1, fallback=0, plain_error=0),
        line("a", calibrated_error=1.0),
    ],
)
def test_what_is_no_ledger_is_refused(text: bytes) -> None:
    with pytest.raises(LedgerError, match="1"):
        calibration_by_role([text])
