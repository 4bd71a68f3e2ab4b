"""Self-speculative decoding: the model's own MTP layer guesses a token, and the next step verifies it.

The row of the token just sampled goes through the MTP layer, with the sampled token as the one that follows: its logits
are a guess of the token after. The next step computes two decode rows, the sampled token and the guess. If the token
sampled from the first row is the guess, the second row's was computed from the right tokens and counts as well. What is
sampled never depends on guesses, so the answer is the one that plain decoding gives (in float32 to the bit).

The MTP layer keeps keys of its own, in the last pool, for every row: prompts, decode rows, and what is computed again
after a preemption. A wrong guess leaves a key behind in every pool, at the position that the next step writes again.
The last key of a reused page was computed with the token that followed in the other prompt: guesses only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from memopt.errors import UnsupportedError
from memopt.runtime.kv.layer_kv import KvPools
from memopt.runtime.model.decoder import Decoder
from memopt.runtime.model.step_rows import StepRows

# Guesses a step. A second one would come from a layer that was trained for the first.
NUM_DRAFTS = 1


@dataclass(frozen=True, slots=True)
class MtpDrafter:
    """The first MTP layer of a decoder whose pools hold one layer more than it has itself."""

    decoder: Decoder

    def draft(self, hidden: Tensor, next_tokens: Tensor, rows: StepRows, pools: KvPools, sampled: Tensor) -> Tensor:
        """int64 [S]: the guess behind each of the rows `sampled` int64 [S]; stores the keys of all rows.

        `hidden` [R, hidden]: the decoder's, before the final norm. `next_tokens` int64 [R]: the token after each row's.
        """
        layer = self.decoder.mtp_layers[0]
        kv = pools.layers[len(self.decoder.layers)]
        normed = layer.forward(replace(rows, token_ids=next_tokens), self.decoder.normed(hidden), kv)
        return layer.logits(normed.index_select(0, sampled)).argmax(dim=-1)


def mtp_drafter(decoder: Decoder) -> MtpDrafter:
    """The drafter of a decoder. UnsupportedError when the release has no MTP layer."""
    if not decoder.mtp_layers:
        raise UnsupportedError(
            f"speculative decoding needs a multi-token prediction layer, and this {decoder.config.family} has none",
            remedy="leave speculative off",
        )
    return MtpDrafter(decoder)
