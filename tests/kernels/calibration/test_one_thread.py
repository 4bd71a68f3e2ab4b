"""One CPU thread within, as many as before after it."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels.calibration.one_thread import one_cpu_thread


def test_the_number_of_threads_is_put_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_cpu_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(KeyError), one_cpu_thread():
            raise KeyError
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
