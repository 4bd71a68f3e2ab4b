"""The one hierarchy of errors: each has a stable code, an exit code, a message and what to do next."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit codes of the `memopt` command (docs/design.md, "Errors")."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    SIGNATURE = 3
    CONTENT = 4
    POLICY = 5
    LAYOUT = 6
    IO = 7
    MALFORMED = 8
    UNSUPPORTED = 9
    # The shell's convention for Ctrl-C (128 + SIGINT); SIGTERM gives 143.
    INTERRUPTED = 130


class MemoptError(Exception):
    """Base of every refusal. `message` says what is wrong, `remedy` what to do about it.

    `tensor` and `file` name the place when there is one; `code` never changes between versions.
    """

    code: ClassVar[str] = "MEMOPT_INTERNAL"
    exit_code: ClassVar[ExitCode] = ExitCode.INTERNAL

    def __init__(self, message: str, *, remedy: str = "", tensor: str | None = None, file: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.tensor = tensor
        self.file = file

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.file, self.tensor) if part and part not in self.message)
        text = f"{place}: {self.message}" if place else self.message
        return f"{text} ({self.remedy})" if self.remedy else text


class UsageError(MemoptError):
    """The command or call itself is wrong: a flag, a path, a combination."""

    code = "MEMOPT_USAGE"
    exit_code = ExitCode.USAGE


class RecipeError(UsageError):
    """A recipe is malformed, of another family, or has a rule that matches nothing."""

    code = "MEMOPT_RECIPE"


class AlignmentError(UsageError):
    """A group size or tensor-parallel degree does not divide a tensor."""

    code = "MEMOPT_ALIGNMENT"


class CapacityError(UsageError):
    """A model, a length or a number of requests does not fit the GPUs it is planned for."""

    code = "MEMOPT_CAPACITY"


class LintError(UsageError):
    """An engine would refuse or garble the planned output."""

    code = "MEMOPT_LINT"


class OutputError(UsageError):
    """The output folder cannot be used: not empty, inside the source, another plan's, locked."""

    code = "MEMOPT_OUTPUT"


class PageError(MemoptError):
    """Who holds which KV page was told wrong: a page freed twice, or shared by somebody who does not hold it."""

    code = "MEMOPT_PAGE"


class ContentError(MemoptError):
    """Bytes are not what they must be: a digest, a size, a value."""

    code = "MEMOPT_CONTENT"
    exit_code = ExitCode.CONTENT


class NonFiniteError(ContentError):
    """A weight or scale is NaN or infinite."""

    code = "MEMOPT_NONFINITE"


class SizeMismatchError(ContentError):
    """A written file differs from the plan's size."""

    code = "MEMOPT_SIZE_MISMATCH"


class SourceChangedError(ContentError):
    """A source file changed while it was read, or differs from the digest its repository publishes."""

    code = "MEMOPT_SOURCE_CHANGED"


class LayoutError(MemoptError):
    """Files or tensors are missing, unlisted or of the wrong kind."""

    code = "MEMOPT_LAYOUT"
    exit_code = ExitCode.LAYOUT


class MissingFileError(LayoutError):
    """A file that the index or the checkpoint needs is not there."""

    code = "MEMOPT_MISSING_FILE"


class MissingTensorError(LayoutError):
    """The family expects a tensor that the checkpoint lacks."""

    code = "MEMOPT_MISSING_TENSOR"


class UnknownTensorError(LayoutError):
    """The checkpoint has a tensor that the family does not know."""

    code = "MEMOPT_UNKNOWN_TENSOR"


class MemoptIOError(MemoptError):
    """The file system or network failed; a retry may work."""

    code = "MEMOPT_IO"
    exit_code = ExitCode.IO


class DiskFullError(MemoptIOError):
    """No space is left; finished units are kept."""

    code = "MEMOPT_DISK_FULL"


class NetworkError(MemoptIOError):
    """The Hub could not be reached or broke off."""

    code = "MEMOPT_NETWORK"


class PeerError(MemoptIOError):
    """Another process of the same service, a rank or a stage, ended or does not answer."""

    code = "MEMOPT_PEER"


class InterruptedRunError(MemoptIOError):
    """The user stopped the run; the state on disk can be resumed."""

    code = "MEMOPT_INTERRUPTED"
    exit_code = ExitCode.INTERRUPTED


class MalformedError(MemoptError):
    """An input file breaks its format."""

    code = "MEMOPT_MALFORMED"
    exit_code = ExitCode.MALFORMED


class HeaderError(MalformedError):
    """A safetensors header breaks the format."""

    code = "MEMOPT_HEADER"


class TruncatedError(MalformedError):
    """A file is shorter than its header says."""

    code = "MEMOPT_TRUNCATED"


class LfsPointerError(MalformedError):
    """A file is a Git-LFS pointer, not the data."""

    code = "MEMOPT_LFS_POINTER"


class IndexFileError(MalformedError):
    """model.safetensors.index.json is malformed or points outside its folder."""

    code = "MEMOPT_INDEX"


class ConfigError(MalformedError):
    """config.json is malformed or lacks a field."""

    code = "MEMOPT_CONFIG"


class ShapeError(MalformedError):
    """A tensor's shape or dtype is not what the family or its scale needs."""

    code = "MEMOPT_SHAPE"


class FileNameError(MalformedError):
    """A file name that could mean another file than it shows."""

    code = "MEMOPT_FILE_NAME"


class ManifestError(MalformedError):
    """memopt.manifest.json, memopt.chunks or SHA256SUMS breaks its format."""

    code = "MEMOPT_MANIFEST"


class LedgerError(MalformedError):
    """ledger.jsonl breaks its format."""

    code = "MEMOPT_LEDGER"


class BundleError(MalformedError):
    """A signature bundle breaks its format."""

    code = "MEMOPT_BUNDLE"


class UnsignedError(BundleError):
    """There is no signature at all."""

    code = "MEMOPT_UNSIGNED"


class PolicyFileError(MalformedError):
    """A trust policy (trust.json) breaks its format."""

    code = "MEMOPT_POLICY_FILE"


class HandOverError(MalformedError):
    """What the prefill stage hands over breaks its format, or is of another model or another kind of pages."""

    code = "MEMOPT_HAND_OVER"


class DataFileError(MalformedError):
    """Text or token ids for calibration or evaluation are empty, too short or wrongly encoded."""

    code = "MEMOPT_DATA"


class QualityFileError(MalformedError):
    """quality.json breaks its format."""

    code = "MEMOPT_QUALITY_FILE"


class SignatureError(MemoptError):
    """A signature does not hold, is missing, or is by a key that is not trusted."""

    code = "MEMOPT_SIGNATURE"
    exit_code = ExitCode.SIGNATURE


class KeyFileError(MemoptError):
    """A key file cannot be used: passphrase, permissions, format."""

    code = "MEMOPT_KEY"
    exit_code = ExitCode.SIGNATURE


class PolicyError(MemoptError):
    """The trust policy forbids this release: expired, rolled back, revoked, another model, code."""

    code = "MEMOPT_POLICY"
    exit_code = ExitCode.POLICY


class QualityGateError(MemoptError):
    """A release's measured quality is outside its recipe's gate: it must not be signed."""

    code = "MEMOPT_QUALITY_GATE"
    exit_code = ExitCode.POLICY


class UnsupportedError(MemoptError):
    """A well-formed input that memopt does not handle."""

    code = "MEMOPT_UNSUPPORTED"
    exit_code = ExitCode.UNSUPPORTED
