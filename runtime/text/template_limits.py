"""How much of the machine a chat template may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Of one rendering: its seconds, the address space of its process, the characters of its text."""

    seconds: float = 20.0
    memory_bytes: int = 1 << 30
    max_characters: int = 1 << 24
