"""What the statistics and the rounding of one module take in memory: the terms of a calibration's budget.

Working memory was measured as what torch's allocator holds at its highest while `solve` rounds modules of many shapes
on a CPU; tests/compressor/calibrate/test_module_memory.py measures it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memopt.compressor.recipe import Int4Format
from memopt.kernels.layout import CALIBRATION_CHUNK_TOKENS, CODES_PER_WORD

# Of `solve`, its float32 weight included: bytes a weight without a Hessian, and with one in its two largest steps.
# Factors: four float64 matrices. Refining: float32 copies of the weight beside float32 Hessians.
PLAIN_BYTES_A_WEIGHT = 29
FACTOR_BYTES_A_WEIGHT, FACTOR_BYTES_A_HESSIAN_ELEMENT = 8, 32
REFINE_BYTES_A_WEIGHT, REFINE_BYTES_A_HESSIAN_ELEMENT = 38, 14
# Of `StatisticsCollector.add` for each element of a chunk: joined with new ones, the whole chunks of that, and float64
# squares, or float32 values and a strip of products.
ADD_BYTES_A_CHUNK_ELEMENT = 2 * torch.bfloat16.itemsize + torch.float64.itemsize
# The same for each new element.
ADD_BYTES_A_NEW_ELEMENT = 2 * torch.bfloat16.itemsize


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Of a module with `num_rows` x `num_columns` weights, rounded by `form`; rows of gate and up count together.

    `most_tokens`: inputs that it can get at all.
    """

    num_rows: int
    num_columns: int
    form: Int4Format
    most_tokens: int

    @property
    def statistics_bytes(self) -> int:
        """Hessian float32 (gptq), second moments float64 and float32; none of a module that is rounded plainly."""
        if not self.form.is_calibrated:
            return 0
        moments = self.num_columns * (torch.float64.itemsize + torch.float32.itemsize)
        return moments + torch.float32.itemsize * self._hessian_elements

    @property
    def waiting_bytes(self) -> int:
        """Inputs in BF16 that wait for a full chunk."""
        return self._chunk_elements * torch.bfloat16.itemsize

    def input_bytes(self, num_tokens: int) -> int:
        """Of so many inputs in BF16."""
        return num_tokens * self.num_columns * torch.bfloat16.itemsize

    @property
    def codes_bytes(self) -> int:
        """INT4 codes and BF16 scales."""
        num_groups = self.num_columns // (self.form.weights_per_scale or self.num_columns)
        packed = self.num_rows * (self.num_columns // CODES_PER_WORD) * torch.int32.itemsize
        return packed + self.num_rows * num_groups * torch.bfloat16.itemsize

    @property
    def solve_bytes(self) -> int:
        """Working memory of one module's rounding, from its stored weight to its codes."""
        weights, elements = self.num_rows * self.num_columns, self._hessian_elements
        if not elements:
            return PLAIN_BYTES_A_WEIGHT * weights
        return max(
            FACTOR_BYTES_A_WEIGHT * weights + FACTOR_BYTES_A_HESSIAN_ELEMENT * elements,
            REFINE_BYTES_A_WEIGHT * weights + REFINE_BYTES_A_HESSIAN_ELEMENT * elements,
        )

    def add_bytes(self, num_tokens: int, num_workers: int = 1) -> int:
        """Working memory while `num_workers` modules take `num_tokens` new inputs between them."""
        new = ADD_BYTES_A_NEW_ELEMENT * num_tokens * self.num_columns
        return new + num_workers * ADD_BYTES_A_CHUNK_ELEMENT * self._chunk_elements

    def alone_bytes(self, batch_tokens: int) -> int:
        """All that a dense module takes: its statistics, collected in batches, and its rounding."""
        collecting = self.waiting_bytes + self.add_bytes(batch_tokens)
        return self.statistics_bytes + max(collecting, self.solve_bytes + self.codes_bytes)

    @property
    def _hessian_elements(self) -> int:
        return self.num_columns**2 if self.form.method == "gptq" else 0

    @property
    def _chunk_elements(self) -> int:
        return min(CALIBRATION_CHUNK_TOKENS, self.most_tokens) * self.num_columns if self.form.is_calibrated else 0
