"""How much of the machine a chat template may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Of one rendering: its seconds, its process's address space, the characters of its text, the bytes asked."""

    seconds: float = 20.0
    memory_bytes: int = 1 << 30
    max_characters: int = 1 << 24
    # As JSON, whose text, values and copies must fit into the memory.
    max_request_bytes: int = 1 << 27
