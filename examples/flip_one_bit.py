"""Flip the lowest bit of one byte of a file, in place: python flip_one_bit.py FILE OFFSET_BYTES"""

from __future__ import annotations

import sys


def flip_one_bit(path: str, offset_bytes: int) -> None:
    """Change one bit of `path`; IndexError if the file ends before `offset_bytes`."""
    with open(path, "r+b") as stream:
        stream.seek(offset_bytes)
        byte = stream.read(1)[0]
        stream.seek(offset_bytes)
        stream.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    flip_one_bit(sys.argv[1], int(sys.argv[2]))
