"""What a verification found: every finding, and the one code that counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.errors import ExitCode, MemoptError

VERIFY_SCHEMA = "memopt.verify/1"
# Highest first: who signed comes before what is in it, that before how it lies on disk.
PRIORITY = (
    ExitCode.SIGNATURE,
    ExitCode.POLICY,
    ExitCode.MALFORMED,
    ExitCode.UNSUPPORTED,
    ExitCode.LAYOUT,
    ExitCode.CONTENT,
    ExitCode.IO,
    ExitCode.USAGE,
    ExitCode.INTERNAL,
)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. `start_bytes` and `end_bytes` bound the bad chunk in `file`, when there is one."""

    code: str
    exit_code: int
    message: str
    remedy: str = ""
    file: str | None = None
    chunk: int | None = None
    start_bytes: int | None = None
    end_bytes: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification. `is_partial`: some listed files were not looked at (--rank, --quick)."""

    is_ok: bool
    exit_code: int
    findings: tuple[Finding, ...]
    warnings: tuple[str, ...] = ()
    identity: str | None = None
    counter: int | None = None
    root_digest: str | None = None
    key_hints: tuple[str, ...] = ()
    num_files: int = 0
    num_verified_files: int = 0
    verified_bytes: int = 0
    seconds: float = 0.0
    is_partial: bool = False


def _finding(error: MemoptError) -> Finding:
    return Finding(
        error.code,
        int(error.exit_code),
        error.message,
        error.remedy,
        error.file,
        getattr(error, "chunk", None),
        getattr(error, "start_bytes", None),
        getattr(error, "end_bytes", None),
    )


@dataclass
class FindingList:
    """Collects findings while a verification goes on; the same one twice counts once."""

    findings: list[Finding] = field(default_factory=list)
    _seen: set[Finding] = field(default_factory=set)

    def add(self, error: MemoptError) -> None:
        """Record a refusal; a BadChunkError brings its chunk and offsets."""
        finding = _finding(error)
        if finding not in self._seen:
            self._seen.add(finding)
            self.findings.append(finding)

    def replace(self, error: MemoptError) -> None:
        """Put `error` in place of all findings of its file that have its exit code: it explains them."""
        finding = _finding(error)
        explained = [f for f in self.findings if (f.file, f.exit_code) == (finding.file, finding.exit_code)]
        place = self.findings.index(explained[0]) if explained else len(self.findings)
        kept = [f for f in self.findings[place:] if f not in explained]
        self.findings[place:] = [finding, *kept]
        self._seen.add(finding)

    @property
    def exit_code(self) -> int:
        """The highest-priority code among the findings, 0 without any."""
        codes = {finding.exit_code for finding in self.findings}
        return next((int(code) for code in PRIORITY if int(code) in codes), max(codes, default=0))


def first_finding(verdict: Verdict) -> Finding | None:
    """The finding that gave the verdict its exit code."""
    return next((finding for finding in verdict.findings if finding.exit_code == verdict.exit_code), None)
