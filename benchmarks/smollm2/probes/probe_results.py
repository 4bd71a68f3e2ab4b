"""What a probe gave, kept in a file, so that a table may be put together from several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.smollm2.probes.group_sizes import LayerErrors, LayerGroups
from benchmarks.smollm2.probes.probe import Probe
from benchmarks.smollm2.probes.window_kl import WindowScores


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`source`: digest of checkpoint and texts. `texts`: scores by held-out text. `groups`, `errors`: a layer each.

    `cpu_seconds`: of calibrating, measuring left out.
    """

    probe: Probe
    source: str
    num_windows: int
    groups: tuple[LayerGroups, ...]
    errors: tuple[LayerErrors, ...]
    texts: dict[str, WindowScores]
    cpu_seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Codes and scales of the routed experts; all layers are of one size."""
        return sum(groups.bits_per_weight for groups in self.groups) / len(self.groups)


_RESULT = TypeAdapter(ProbeResult)


class ResultFolder:
    """Results by the probe's name; one of another source, number of windows or definition is not there."""

    def __init__(self, folder: Path, source: str, num_windows: int) -> None:
        self._folder = folder
        self._source = source
        self._num_windows = num_windows

    def find(self, probe: Probe) -> ProbeResult | None:
        """The kept result; raises pydantic's ValidationError for a file that is none."""
        path = self._path(probe)
        if not path.exists():
            return None
        found = _RESULT.validate_json(path.read_bytes())
        wanted = (probe, self._source, self._num_windows)
        return found if (found.probe, found.source, found.num_windows) == wanted else None

    def keep(self, result: ProbeResult) -> None:
        """Write it; an older one of that name goes."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._path(result.probe).write_bytes(_RESULT.dump_json(result, indent=1))

    def _path(self, probe: Probe) -> Path:
        return self._folder / f"{probe.name}-{self._num_windows}.json"
