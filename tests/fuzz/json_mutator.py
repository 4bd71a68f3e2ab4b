"""Changing a value somewhere in a JSON document: bytes changed at random are hardly ever JSON again."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

_LENGTH_SIZE_BYTES = 8
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**63, 2**70, 0.5, 1e300, "", "a", "../x", "/x", "a\nb", "\u202e"),
    *([], {}, [[]], [0], [1, 1], [3, 2], {"a": 1}, "ab" * 32, "AB" * 32, "a" * 300, "model.sig", "ledger.jsonl", "U8"),
)


def mutated_json(raw: bytes, seed: int) -> bytes | None:
    """`raw`, a JSON document or a safetensors file, with one to three values changed; None if it is neither."""
    choose = random.Random(seed)
    start = 0 if raw[:1] == b"{" else _LENGTH_SIZE_BYTES
    end = len(raw) if start == 0 else start + int.from_bytes(raw[:start], "little")
    try:
        document = json.loads(raw[start:end])
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not document:
        return None
    for _ in range(choose.randint(1, 3)):
        _change(document, choose)
    text = json.dumps(document).encode()
    return text if start == 0 else len(text).to_bytes(start, "little") + text + raw[end:]


def _change(place: Any, choose: random.Random) -> None:
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = choose.choice(keys)
        below = place[key]
        if isinstance(below, (dict, list)) and below and choose.random() < 0.8:
            place = below
            continue
        break
    action = choose.randrange(5)
    if action == 0:
        del place[key]
    elif action == 1:
        place[key] = deepcopy(place[choose.choice(keys)])
    elif action == 2 and isinstance(place, dict):
        place[choose.choice(("", "x", "a\nb", "path", "size_bytes", "__metadata__"))] = deepcopy(below)
    elif action == 3 and isinstance(place, list):
        place.append(deepcopy(below))
    elif action == 4 and isinstance(below, int) and not isinstance(below, bool):
        place[key] = below + choose.choice((-1, 1, 8, -8, 2**32))
    else:
        place[key] = deepcopy(choose.choice(_VALUES))
