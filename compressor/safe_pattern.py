"""Regular expressions from outside, refused where Python's matcher could take longer than anyone waits.

`re` backtracks: `(.*)*x` on a name of 60 letters never ends. A source's `ignore` list and a recipe's `names` come from
outside, so a pattern is read only while its worst case on a name of a model is bounded.
"""

from __future__ import annotations

import re
import warnings

MAX_PATTERN_LENGTH = 500
# Tensor names of the supported models have about 80 letters.
MAX_NAME_LENGTH = 256
# What the matcher may try at worst: a repeat counts as the places where it may end, a choice as its branches.
MAX_WAYS = 10**9
_WAYS_OF_A_REPEAT = 100
_MAX_COUNT = 1000

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?(?:<?[=!]|:)|\{\d+(?:,\d*)?\}|\{,\d+\}|.", re.DOTALL)
_GROUP = re.compile(r"\(([^()]*)\)([*e]?)")
# In an outline: a repeat, an exact count, an optional item, a branch, a group that holds one of these.
_VARIABLE = set("*e?|b")


def _outline(pattern: str) -> str:
    """The pattern's shape, a letter an item: `a` one character, `*` a repeat, `e` an exact count, and ( ) | ?."""
    letters: list[str] = []
    for token in _TOKEN.findall(pattern):
        if token.startswith("\\") and token[1] in "123456789":
            raise ValueError("back-references are not read")
        if token.startswith("{") and len(token) > 1:
            if any(int(number) > _MAX_COUNT for number in re.findall(r"\d+", token)):
                raise ValueError(f"{token} counts beyond {_MAX_COUNT}")
            letters.append("*" if "," in token else "e")
        elif token in ("*", "+"):
            letters.append("*")
        elif token.startswith("("):
            letters.append("(")
        else:
            letters.append(token if token in (")", "|", "?") else "a")
    outline = "".join(letters)
    if "(?" in outline:
        raise ValueError("flags and named groups are not read")
    # Lazy and possessive repeats (`*?`, `*+`) try no more than plain ones.
    return re.sub(r"([*e?])[*?]", r"\1", outline)


def _check_cost(pattern: str) -> None:
    """ValueError saying what makes `pattern`, which compiles, too expensive."""
    outline = _outline(pattern)
    ways = _WAYS_OF_A_REPEAT ** outline.count("*") * 2 ** outline.count("?")
    while group := _GROUP.search(outline):
        body, repeat = group.groups()
        is_variable = bool(set(body) & _VARIABLE)
        if repeat and is_variable:
            raise ValueError("a repeated group holds a repeat or a choice itself")
        ways *= body.count("|") + 1
        outline = outline[: group.start()] + ("b" if is_variable else "a") + repeat + outline[group.end() :]
    if ways * (outline.count("|") + 1) > MAX_WAYS:
        raise ValueError("it may try too many ways; at most four repeats, or fewer beside choices")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """`pattern` compiled; ValueError saying why if it is no regular expression, or one that could take forever."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(f"a pattern of {len(pattern)} characters, at most {MAX_PATTERN_LENGTH} are read")
    try:
        # A set like "[[a]" is read as today; Python's notice of a future meaning is not the user's business.
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as problem:
        raise ValueError(f"{pattern!r} is not a regular expression: {problem}") from None
    try:
        _check_cost(pattern)
    except ValueError as problem:
        raise ValueError(f"{pattern!r} is not matched: {problem}") from None
    return compiled
