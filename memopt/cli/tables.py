"""Inspections and plans as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from memopt.cli.output import duration_text, one_line, size_text
from memopt.compressor.estimate import Estimate
from memopt.compressor.inspection import Inspection
from memopt.compressor.plan import Plan
from memopt.compressor.ranks.layout import EXPERT_PARALLEL
from memopt.compressor.tensor_plan import Fate

MAX_LISTED_PROBLEMS = 20
MAX_LISTED_FILES = 12


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would end with exit code 1; `refusals` knows what to do.
        raise


def make_console(*, stderr: bool = False) -> Console:
    """A console that takes text as it is (no markup) and does not cut lines when its output is not a terminal."""
    console = _Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if console.is_terminal:
        return console
    return _Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True, width=160)


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number > 1 else "left")
    return table


def print_inspection(console: Console, found: Inspection) -> None:
    """Family, sizes, formats by role, degrees and problems."""
    where = f", {found.repository} at {found.commit}" if found.repository else ""
    console.print(f"family      {found.family} ({one_line(found.architecture or found.model_type)}){where}")
    console.print(f"layers      {found.num_layers} + {found.num_mtp_layers} MTP")
    console.print(
        f"tensors     {found.num_stored_tensors:,} in {found.num_files} files, {found.num_weights:,} weights"
        f" ({found.num_elements:,} elements with scales)"
    )
    console.print(f"size        {size_text(found.size_bytes)}")
    degrees = ", ".join(map(str, found.tensor_parallel_degrees)) or "none"
    console.print(f"TP degrees  {degrees} (as stored; `memopt plan` tells for a recipe)")
    if found.suggested_recipe:
        console.print(f"recipe      {found.suggested_recipe}")
    table = _table("role", "format", "tensors", "weights", "size", title="\nFormats by role")
    for row in found.roles:
        table.add_row(row.role, row.format, f"{row.num_tensors:,}", f"{row.num_weights:,}", size_text(row.size_bytes))
    console.print(table)
    if found.problems:
        console.print(f"\n{len(found.problems):,} problems")
        for problem in found.problems[:MAX_LISTED_PROBLEMS]:
            console.print(f"  {problem.code}  {one_line(problem.message)}")
        if len(found.problems) > MAX_LISTED_PROBLEMS:
            console.print(f"  and {len(found.problems) - MAX_LISTED_PROBLEMS:,} more (--json lists all)")
    else:
        console.print("\nno problems found")


def print_plan(console: Console, plan: Plan, sizes: dict[str, int], guess: Estimate) -> None:
    """Fates by role, output files, lint, totals."""
    _print_fates(console, plan)
    console.print(f"\nOutput files ({len(sizes)})")
    names = [*sizes]
    shown = names if len(names) <= MAX_LISTED_FILES else [*names[: MAX_LISTED_FILES // 2], "", *names[-4:]]
    for name in shown:
        console.print(f"  {name:<44} {sizes[name]:>18,} B" if name else "  … (--json lists all)")
    for skipped in plan.skipped_files:
        console.print(f"  not copied: {one_line(skipped.name)} ({skipped.reason})")
    engines = ", ".join(plan.recipe.engines) or "none promised"
    kind = "expert-parallel" if plan.checked_ranks.kind == EXPERT_PARALLEL else "tensor-parallel"
    console.print(f"\nEngine lint: passes for {engines}; {kind} {plan.tensor_parallel} divides")
    for note in plan.notes:
        module = f" ({note.module})" if note.module else ""
        console.print(f"  {note.engine}: {note.message}{module}")
    console.print(f"\nsource      {size_text(plan.source.size_bytes)} in {len(plan.source.tensors):,} tensors")
    console.print(
        f"output      {size_text(plan.weights_size_bytes)} of weights, {size_text(sum(sizes.values()))} in all"
    )
    console.print(
        f"estimate    {duration_text(guess.seconds)} with {guess.workers} workers on a CPU,"
        f" {size_text(guess.host_memory_bytes)} of host memory"
    )


def _print_fates(console: Console, plan: Plan) -> None:
    rows: dict[tuple[str, str, str, str], list[int]] = {}
    for tensor in plan.tensors:
        key = (
            str(tensor.source.spec.role),
            str(tensor.fate),
            tensor.source.description,
            tensor.output_format if tensor.fate is not Fate.DROPPED else tensor.reason,
        )
        row = rows.setdefault(key, [0, 0, 0])
        row[0] += 1
        row[1] += tensor.source.size_bytes
        row[2] += sum(output.size_bytes for output in tensor.outputs)
    table = _table("role", "fate", "from", "to", "tensors", "in", "out", title=f"Plan: recipe {plan.recipe.name}")
    for (role, fate, before, after), (count, size_in, size_out) in sorted(rows.items(), key=lambda item: -item[1][1]):
        table.add_row(role, fate, before, after, f"{count:,}", size_text(size_in), size_text(size_out))
    console.print(table)
