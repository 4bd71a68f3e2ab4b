"""Signing holds the quality.json that is there against the release, whether its recipe sets a gate or not."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from calibrated_runs import recipe
from cli.invoke import invoke
from evaluate_scores import made_quality
from faults.small_source import compress, make_small_source
from signing_keys import fixed_key

import memopt
from memopt.compressor.evaluate.quality import Quality
from memopt.compressor.evaluate.quality_file import QUALITY_NAME, render_quality
from memopt.compressor.evaluate.release_gate import read_evaluated_release, require_release_gate, require_writable
from memopt.compressor.evaluate.release_weights import read_release_weights
from memopt.errors import ContentError, DiskFullError, LayoutError, QualityFileError, QualityGateError
from memopt.manifests.signer import KeySigner

ROUNDED = [{"roles": ["routed_expert"], "format": {"type": "int4"}}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`free` has no gate, `gated` one."""
    folder = tmp_path_factory.mktemp("releases")
    make_small_source(folder / "source")
    compress(folder / "source", folder / "free", recipe=recipe(ROUNDED))
    compress(folder / "source", folder / "gated", recipe=recipe(ROUNDED, gate={"kl_max": 5.0}))
    return folder


def measured(release: Path) -> Quality:
    """Figures that are said to be of these weights."""
    quality = made_quality()
    return replace(quality, release=replace(quality.release, sha256=read_release_weights(release).sha256))


def copied(made: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / name, tmp_path / name))


def sign(release: Path) -> None:
    memopt.sign_release(release, [KeySigner(fixed_key())], memopt.SignOptions("acme/x", 1))


@pytest.mark.parametrize("name", ["free", "gated"])
def test_own_figures_are_signed_and_another_releases_are_not(made: Path, name: str, tmp_path: Path) -> None:
    release = copied(made, name, tmp_path)
    (release / QUALITY_NAME).write_bytes(render_quality(made_quality()))
    with pytest.raises(ContentError, match="measured on other weights") as refused:
        sign(release)
    assert refused.value.file == QUALITY_NAME
    assert not (release / "model.sig").exists()
    (release / QUALITY_NAME).write_bytes(render_quality(measured(release)))
    sign(release)
    assert (release / "model.sig").exists()


def test_figures_are_asked_for_by_a_gate_alone(made: Path) -> None:
    assert require_release_gate(made / "free") == ()
    with pytest.raises(QualityGateError, match=r"there is no quality\.json"):
        require_release_gate(made / "gated")


@pytest.mark.parametrize("name", ["free", "gated"])
def test_what_is_no_quality_file_is_not_signed(made: Path, name: str, tmp_path: Path) -> None:
    release = copied(made, name, tmp_path)
    good = measured(release)
    for raw in (b"", b"{}", render_quality(good)[:-1], render_quality(replace(good, num_tokens=0))):
        (release / QUALITY_NAME).write_bytes(raw)
        with pytest.raises(QualityFileError):
            sign(release)
    (release / QUALITY_NAME).unlink()
    (release / QUALITY_NAME).mkdir()
    with pytest.raises(LayoutError, match="not a regular file"):
        sign(release)
    assert not (release / "model.sig").exists()


def test_where_nothing_can_be_written_is_told_before_any_work(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = copied(made, "free", tmp_path)
    require_writable(release)
    call = ("evaluate", made / "source", release, "--data", tmp_path / "none.safetensors")
    for name, put, remove in (
        ("report.html", Path.mkdir, Path.rmdir),
        (QUALITY_NAME, lambda path: path.symlink_to("elsewhere"), Path.unlink),
    ):
        put(release / name)
        refused = invoke(*call)
        assert (refused.code, f"{name}: is in the way" in refused.refusal) == (2, True)
        # Without writing, the data comes next.
        assert "there is no none.safetensors" in invoke(*call, "--no-write").refusal
        remove(release / name)
    monkeypatch.setattr(os, "access", lambda path, mode: not (Path(path) == release and mode == os.W_OK))
    refused = invoke(*call)
    assert (refused.code, "cannot be written into (give yourself the right to" in refused.refusal) == (2, True)


def test_nothing_is_written_through_a_link_and_nothing_is_left(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = copied(made, "free", tmp_path)
    before = set(os.listdir(release))
    for name in ("report.html", QUALITY_NAME):
        (release / f".{name}.partial").symlink_to(tmp_path / f"outside-{name}")
    evaluated = read_evaluated_release(release)
    evaluated.write(measured(release))
    assert not list(tmp_path.glob("outside-*"))
    assert set(os.listdir(release)) - before == {"report.html", QUALITY_NAME}
    good = (release / QUALITY_NAME).read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError):
        evaluated.write(made_quality())
    assert set(os.listdir(release)) - before == {"report.html", QUALITY_NAME}
    assert (release / QUALITY_NAME).read_bytes() == good
