"""Budgets of compiled kernels: budgets/<topic>.json, {case: {target: figures}}. A figure may only go down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled.build import Figures

FOLDER = Path(__file__).parent / "budgets"
# Further below its budget than this, and the budget must follow.
SLACK = 0.05

Budget = Mapping[str, Mapping[str, Mapping[str, Any]]]


def path_of(topic: str) -> Path:
    """The file with the budgets of compiled/cases_<topic>.py."""
    return FOLDER / f"{topic}.json"


def read_budget(topic: str) -> dict[str, dict[str, dict[str, Any]]]:
    """The budgets of a topic; empty when there are none yet."""
    path = path_of(topic)
    return json.loads(path.read_text()) if path.exists() else {}


def _limits(figures: Figures) -> list[str]:
    """What no budget may allow."""
    found = []
    if figures.shared_bytes > figures.max_shared_bytes:
        found.append(f"shared memory of {figures.shared_bytes} bytes, but the target has {figures.max_shared_bytes}")
    if figures.num_local_accesses:
        found.append(f"{figures.num_local_accesses} accesses to local memory in the inner loop")
    if figures.load_bits is not None and figures.load_bits < figures.min_load_bits:
        found.append(f"the widest load is {figures.load_bits} bits, but {figures.min_load_bits} are needed")
    return found


def _against(figures: Figures, budget: Mapping[str, Any]) -> list[str]:
    found = []
    for name in ("registers", "spill_bytes", "shared_bytes", "instructions_per_item"):
        value, allowed = getattr(figures, name), budget.get(name)
        if (value is None) != (allowed is None):
            found.append(f"{name} is {value}, but the budget says {allowed}")
        elif value is not None and value > allowed:
            found.append(f"{name} {value} is above its budget of {allowed}")
    if budget.get("spill_bytes") and not budget.get("reason"):
        found.append("a budget that allows spills needs a reason")
    count, allowed = figures.instructions_per_item, budget.get("instructions_per_item")
    if count is not None and allowed is not None and count < allowed * (1 - SLACK):
        found.append(f"instructions_per_item is {count}: lower the budget of {allowed}")
    return found


def findings(figures: Sequence[Figures], budget: Budget) -> list[str]:
    """Why `figures` of a topic break its `budget`, a line each; empty when they do not."""
    found = []
    for one in figures:
        allowed = budget.get(one.case, {}).get(one.target)
        lines = _limits(one) + (["there is no budget"] if allowed is None else _against(one, allowed))
        found += [f"{one.case} {one.target}: {line}" for line in lines]
    pairs = [(one.case, one.target) for one in figures]
    measured = set(pairs)
    found += [
        f"{case} {target}: two cases of this name"
        for case, target in sorted(measured)
        if pairs.count((case, target)) > 1
    ]
    stale = [(case, target) for case, targets in budget.items() for target in targets if (case, target) not in measured]
    return found + [f"{case} {target}: a budget without a case" for case, target in stale]


def rewrite(topic: str, figures: Sequence[Figures]) -> list[str]:
    """Writes the budgets of a topic anew; reasons are kept. Returns a line for every figure that changed."""
    old, changes = read_budget(topic), []
    new: dict[str, dict[str, dict[str, Any]]] = {}
    for one in figures:
        before = old.get(one.case, {}).get(one.target, {})
        entry: dict[str, Any] = {}
        for name in ("registers", "spill_bytes", "shared_bytes", "instructions_per_item"):
            entry[name] = getattr(one, name)
            if before.get(name) != entry[name]:
                rise = before.get(name) is not None and (entry[name] is None or entry[name] > before[name])
                changes.append(
                    f"{one.case} {one.target} {name}: {before.get(name)} -> {entry[name]}{'  UP' if rise else ''}"
                )
        if "reason" in before:
            entry["reason"] = before["reason"]
        new.setdefault(one.case, {})[one.target] = entry
    path_of(topic).write_text(json.dumps(new, indent=2, ensure_ascii=False) + "\n")
    return changes
