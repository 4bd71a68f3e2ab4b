"""float32 products that stay float32, whatever the process has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ieee_float32_matmul() -> Iterator[None]:
    """Within it torch multiplies float32 matrices as float32: no TF32 on CUDA, no BF16 passes on a CPU.

    The setting is the process's: other threads that multiply meanwhile get it too. It is put back at the end.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
