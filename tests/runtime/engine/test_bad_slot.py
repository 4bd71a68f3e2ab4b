"""A key whose slot is in no pool: on a GPU the store only notes it, and the step must not pass for a good one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from page_reading_model import VOCAB_SIZE, PageReadingModel, expected_tokens, generated, greedy, new_pools, run
from torch import Tensor

from memopt.errors import PageError
from memopt.runtime.engine.admission import EngineLimits
from memopt.runtime.engine.engine_core import EngineCore
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.step_rows import StepRows


class NotingModel(PageReadingModel):
    """Notes a bad slot in its second step, as a store on a GPU would."""

    num_steps = 0

    def forward(self, rows: StepRows, pools: KvPools) -> Tensor:
        self.num_steps += 1
        assert pools.bad_slot is not None
        if self.num_steps == 2:
            pools.bad_slot.fill_(1)
        return super().forward(rows, pools)


def test_a_step_with_a_bad_slot_is_refused_and_can_be_tried_again() -> None:
    pools = replace(new_pools(16), bad_slot=torch.zeros(1, dtype=torch.int32))
    limits = EngineLimits(max_requests=2, max_step_tokens=64, max_tokens=256)
    core = EngineCore(NotingModel(), pools, limits, vocab_size=VOCAB_SIZE, eos_token_ids=())
    prompt = [3, 1, 4, 1, 5]
    request = core.submit(prompt, greedy(4))
    core.step()
    with pytest.raises(PageError, match="past the 16 pages"):
        core.step()
    assert len(generated(request)) == 1
    run(core)
    assert generated(request) == expected_tokens(prompt, 4)
