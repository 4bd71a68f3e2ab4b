"""What one step computes: which positions of which requests."""

from __future__ import annotations

from dataclasses import dataclass

from memopt.runtime.engine.request import Request


@dataclass(frozen=True, slots=True)
class ScheduledRows:
    """Rows of one request: positions `first_position` to `first_position + num_rows`.

    Those before the prompt's end are prefill rows, the others decode rows (model/step_rows.py).
    """

    request: Request
    first_position: int
    num_rows: int

    @property
    def num_prefill_rows(self) -> int:
        """Rows of the prompt."""
        return min(max(self.request.num_prompt_tokens - self.first_position, 0), self.num_rows)

    @property
    def num_samples(self) -> int:
        """Rows whose logits are needed: that of the last known token, and those of the drafts behind it."""
        return max(self.first_position + self.num_rows - len(self.request.tokens) + 1, 0)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of a step in the order of their requests' admission, and the requests that had to give up their pages.

    `preempted` are waiting again. `lost` can never run: the pool has too few pages that are not quarantined.
    """

    scheduled: tuple[ScheduledRows, ...]
    preempted: tuple[Request, ...] = ()
    lost: tuple[Request, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all requests."""
        return sum(rows.num_rows for rows in self.scheduled)
