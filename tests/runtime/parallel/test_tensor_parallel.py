"""An engine of several ranks: the logits of one rank within rounding, its tokens, and one fate for all ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_processes import Refusal, run_ranks
from signed_tiny_model import SignedModel, signed_tiny_model
from signing_keys import fixed_key
from tensor_parallel_cases import NUM_TOKENS, Findings, one_rank_alone, open_with_keys, run_one_rank
from tiny_releases import flip_byte

from memopt.errors import ContentError, ExitCode, SignatureError
from memopt.runtime.engine.engine import Engine
from memopt.runtime.engine.sampling_params import SamplingParams

# Rounding of float32 sums over 256 to 512 products in another order. (A BF16 cache rounds keys that lie near the middle
# of two numbers to either: 1.4e-5 of the largest logit here.)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> SignedModel:
    return signed_tiny_model(tmp_path_factory.mktemp("tp2"), tensor_parallel=2)


@pytest.fixture(scope="module")
def alone(release: SignedModel) -> Findings:
    return one_rank_alone(release.folder, release.key)


def assert_ranks_agree(found: list[Findings], alone: Findings) -> None:
    for rank, findings in enumerate(found):
        assert findings.tokens == alone.tokens
        assert all(len(tokens) == NUM_TOKENS for tokens in findings.tokens)
        assert len(findings.logits) == len(alone.logits)
        for logits, expected in zip(findings.logits, alone.logits, strict=True):
            assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()
        for logits, first in zip(findings.logits, found[0].logits, strict=True):
            assert (logits == first).all(), f"rank {rank}"
        assert len(findings.selections) > 0
        assert len(findings.selections) == len(alone.selections)
        for selected, first in zip(findings.selections, found[0].selections, strict=True):
            assert (selected == first).all(), f"rank {rank}"


def assert_one_fate(found: list[Findings], alone: Findings) -> None:
    """The last rank alone saw the fault: the second request ends on all of them, and no other."""
    for findings in found:
        assert [reason for reason, _ in findings.ends] == ["length", "page_mismatch", "length"]
        assert findings.num_mismatches == 1
        for (_, tokens), expected in zip(findings.ends, alone.tokens, strict=True):
            assert tokens == expected[: len(tokens)]
        assert 2 <= len(findings.ends[1][1]) < NUM_TOKENS
        assert findings.ends == found[0].ends


def test_two_ranks(release: SignedModel, alone: Findings) -> None:
    found = run_ranks(2, run_one_rank, release.folder, release.key, 2)
    assert_ranks_agree(found, alone)
    assert_one_fate(found, alone)


def test_eight_ranks(alone: Findings, tmp_path: Path) -> None:
    wide = signed_tiny_model(tmp_path, tensor_parallel=8)
    found = run_ranks(8, run_one_rank, wide.folder, wide.key, 8)
    assert_ranks_agree(found, alone)
    assert_one_fate(found, alone)


def test_one_ranks_flipped_byte_stops_all(release: SignedModel, tmp_path: Path) -> None:
    folder = shutil.copytree(release.folder, tmp_path / "flipped")
    (weights,) = (folder / "tp2" / "rank-1").glob("*.safetensors")
    flip_byte(weights, -100)
    found = run_ranks(2, open_with_keys, folder, [release.key] * 2)
    for refusal in found:
        assert isinstance(refusal, Refusal)
        assert issubclass(refusal.kind, ContentError)
        assert refusal.exit_code == ExitCode.CONTENT
        assert "tp2/rank-1" in refusal.text
    assert "rank 1: " in found[0].text


def test_one_rank_that_does_not_trust_the_signer_stops_all(release: SignedModel, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger.pub"
    stranger.write_bytes(fixed_key(2).public_key.pem)
    found = run_ranks(2, open_with_keys, release.folder, [stranger, release.key])
    for refusal in found:
        assert isinstance(refusal, Refusal)
        assert (refusal.kind, refusal.exit_code) == (SignatureError, ExitCode.SIGNATURE)
    assert "rank 0: " in found[1].text


def test_torchrun_starts_the_ranks_of_memopt_generate(release: SignedModel) -> None:
    programs = Path(sys.executable).parent
    memopt = [str(programs / "memopt"), "generate", str(release.folder), "--verify-key", str(release.key)]
    memopt += ["--prompt", "def main(", "--max-tokens", "6", "--context", "64", "--dtype", "float32"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    command = [*torchrun, *memopt, "--tp", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with Engine(release.folder, key=release.key, dtype="float32", max_tokens=64) as engine:
        (expected,) = engine.generate(["def main("], SamplingParams(max_tokens=6))
    assert len(expected.text) > 5
    assert done.stdout == expected.text + "\n"
