"""float32 products that stay float32, whatever the process has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_IEEE = "ieee"


@contextmanager
def ieee_float32_matmul() -> Iterator[None]:
    """Within it torch multiplies float32 matrices as float32: no TF32 on CUDA, no BF16 passes on a CPU.

    The setting is the process's: other threads that multiply meanwhile get it too. It is put back at the end.
    """
    backends = _matmul_backends()
    if not backends:
        legacy = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(legacy)
        return
    before = [backend.fp32_precision for backend in backends]
    for backend in backends:
        backend.fp32_precision = _IEEE
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _matmul_backends() -> list[Any]:
    """The settings of CUDA and of the CPU; none before torch 2.9, which has one for both.

    From 2.9 on the one for both raises in a process that has ever set one of the two.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    return [] if matmul is None else [torch.backends.cuda.matmul, matmul]
