"""A started request on its way from prefill to decode: everything but the pages themselves.

Written as one JSON object, versioned; whatever a peer sends is checked field by field before anything is done with it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memopt.errors import HandOverError, UsageError
from memopt.kernels.layout import PAGE_TOKENS
from memopt.manifests.strict_json import parse_json_object
from memopt.runtime.engine.admission import pages_for
from memopt.runtime.engine.sampling_params import SamplingParams
from memopt.runtime.kv.held_page import HeldPage
from memopt.runtime.stages.kv_geometry import MAX_LAYERS, KvGeometry, parse_layer
from memopt.runtime.stages.model_identity import ModelIdentity

HAND_OVER_VERSION = 1
MAX_TOKENS = 2**21
MAX_NAME_CHARACTERS = 256
# Ten characters a token id and forty a page, with room to spare.
MAX_HAND_OVER_BYTES = 32 * 2**20
_PLACE = "the hand-over"
_MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HandOver:
    """A request whose prompt is computed and whose first token is chosen.

    `number`: of the hand-over, unique in a transport. `token_ids`: the prompt, whose keys are in `pages`, the sender's,
    in order, with the tags that they have there.
    """

    number: int
    request_id: str
    tenant: str
    token_ids: tuple[int, ...]
    first_token: int
    params: SamplingParams
    model: ModelIdentity
    geometry: KvGeometry
    pages: tuple[HeldPage, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the pages."""
        return len(self.token_ids)


_Number = Annotated[int, Field(ge=0, le=_MAX_INT64)]
_Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _Sampling(_Strict):
    max_tokens: _Number
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    seed: _Number
    stop: Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
    ignore_eos: bool


class _Model(_Strict):
    source: _Digest
    config: _Digest


class _Geometry(_Strict):
    page_tokens: _Number
    layers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=MAX_LAYERS)]


class _Asked(_Strict):
    """What the prefill stage's caller chooses."""

    request_id: _Name
    tenant: _Name
    sampling: _Sampling


class _Header(_Asked):
    version: Literal[1]
    number: Annotated[int, Field(ge=1, le=_MAX_INT64)]
    token_ids: Annotated[list[_Number], Field(min_length=1, max_length=MAX_TOKENS)]
    first_token: _Number
    num_tokens: _Number
    model: _Model
    geometry: _Geometry
    pages: Annotated[list[Annotated[list[_Number], Field(min_length=2, max_length=2)]], Field(max_length=MAX_TOKENS)]


def require_sendable(request_id: str, tenant: str, params: SamplingParams, num_tokens: int) -> None:
    """UsageError for a request that a receiver would refuse to read: it would cut the whole connection off."""
    sampling = asdict(params) | {"stop": list(params.stop)}
    try:
        _Asked.model_validate({"request_id": request_id, "tenant": tenant, "sampling": sampling})
    except ValidationError as problem:
        raise UsageError(
            f"{_first_of(problem)}: this cannot be handed over", remedy="shorten it, or use whole Unicode characters"
        ) from None
    if num_tokens > MAX_TOKENS:
        raise UsageError(f"a prompt of {num_tokens:,} tokens; at most {MAX_TOKENS:,} can be handed over")


def render_hand_over(hand_over: HandOver) -> bytes:
    """The JSON of a hand-over. UsageError for one that is too large to be sent."""
    table = {
        "version": HAND_OVER_VERSION,
        "number": hand_over.number,
        "request_id": hand_over.request_id,
        "tenant": hand_over.tenant,
        "token_ids": hand_over.token_ids,
        "first_token": hand_over.first_token,
        "num_tokens": hand_over.num_tokens,
        "sampling": asdict(hand_over.params),
        "model": asdict(hand_over.model),
        "geometry": {
            "page_tokens": hand_over.geometry.page_tokens,
            "layers": [str(layer) for layer in hand_over.geometry.layers],
        },
        "pages": [[held.page, held.tag] for held in hand_over.pages],
    }
    raw = json.dumps(table, separators=(",", ":"), allow_nan=False).encode()
    if len(raw) > MAX_HAND_OVER_BYTES or hand_over.num_tokens > MAX_TOKENS:
        raise UsageError(f"{hand_over.num_tokens:,} tokens of {hand_over.request_id!r:.80} are too many to hand over")
    return raw


def parse_hand_over(raw: bytes) -> HandOver:
    """What a peer sent. HandOverError for anything that is not exactly what `render_hand_over` writes.

    Whether it fits this engine, its model and its limits, is for the receiver to say.
    """
    if len(raw) > MAX_HAND_OVER_BYTES:
        raise HandOverError(f"{len(raw):,} bytes, at most {MAX_HAND_OVER_BYTES:,} are read", file=_PLACE)
    table = parse_json_object(raw, _PLACE, HandOverError)
    try:
        header = _Header.model_validate(table)
        params = SamplingParams(**header.sampling.model_dump() | {"stop": tuple(header.sampling.stop)})
    except ValidationError as problem:
        raise _refusal(_first_of(problem)) from None
    except UsageError as problem:
        raise _refusal(f"sampling: {problem.message}") from None
    if header.num_tokens != len(header.token_ids):
        raise _refusal(f"num_tokens is {header.num_tokens}, but there are {len(header.token_ids)} token_ids")
    num_pages = pages_for(header.num_tokens)
    if header.geometry.page_tokens == PAGE_TOKENS and len(header.pages) != num_pages:
        raise _refusal(f"{header.num_tokens} tokens lie in {num_pages} pages, not {len(header.pages)}")
    return HandOver(
        number=header.number,
        request_id=header.request_id,
        tenant=header.tenant,
        token_ids=tuple(header.token_ids),
        first_token=header.first_token,
        params=params,
        model=ModelIdentity(header.model.source, header.model.config),
        geometry=KvGeometry(tuple(map(parse_layer, header.geometry.layers)), header.geometry.page_tokens),
        pages=tuple(HeldPage(page, tag) for page, tag in header.pages),
    )


def _first_of(problem: ValidationError) -> str:
    first = problem.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def _refusal(message: str) -> HandOverError:
    return HandOverError(message, file=_PLACE, remedy="both stages must run the same memopt")
