"""The routed experts of a layer, copied into stacks as they come in: a layer is never in memory twice."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import torch
from torch import Tensor

from memopt.errors import ShapeError, UnknownTensorError, UnsupportedError
from memopt.kernels.layout import CODES_PER_WORD
from memopt.runtime.weights.layer_names import ExpertNames

ExpertForm = Literal["int4", "fp8", "plain"]
_PARTS: dict[ExpertForm, tuple[str, ...]] = {
    "int4": ("weight_packed", "weight_scale", "weight_shape"),
    "fp8": ("weight", "weight_scale"),
    "plain": ("weight",),
}
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Half of a stack of gate and up that a projection fills; down has its stack alone.
_PLACE = {"gate_proj": 0, "up_proj": 1, "down_proj": 0}


class ExpertTensors:
    """Stacks [E, 2 * I, ..] of gate's and up's rows, and [E, H, ..] of down's: codes and scales apart."""

    def __init__(self, prefix: str, names: ExpertNames) -> None:
        self.names = names
        self._prefix = prefix
        self._stacks: dict[tuple[bool, str], Tensor] = {}
        self._shapes: dict[tuple[int, str], list[int]] = {}
        self._seen: set[tuple[int, str, str]] = set()
        self._counts: Counter[str] = Counter()
        self._form: ExpertForm | None = None

    @property
    def form(self) -> ExpertForm | None:
        """How the weights are stored; None before the first one came."""
        return self._form

    def add(self, expert: int, projection: str, part: str, tensor: Tensor) -> None:
        """Copy one stored tensor of expert number `expert` (of the model) to its place.

        Raises UnknownTensorError for an expert or part that is not this rank's or comes twice, ShapeError and
        UnsupportedError for one that differs from the other experts.
        """
        name = self._name(expert, projection, part)
        part = "weight_scale" if part == "weight_scale_inv" else part
        if not 0 <= expert - self.names.first < self.names.count or not any(part in parts for parts in _PARTS.values()):
            raise UnknownTensorError(
                f"this rank has experts {self.names.first} to {self.names.first + self.names.count - 1}", tensor=name
            )
        if (expert, projection, part) in self._seen:
            raise UnknownTensorError("the tensor is there twice", tensor=name)
        self._seen.add((expert, projection, part))
        self._counts[part] += 1
        self._note_form(part, tensor, name)
        if part == "weight_shape":
            self._shapes[expert, projection] = tensor.tolist()
            return
        rows = tensor.reshape(-1, 1) if tensor.ndim < 2 else tensor
        stack = self._stack(projection, part, rows)
        first = _PLACE[projection] * rows.shape[0]
        place = stack[expert - self.names.first, first : first + rows.shape[0]]
        if place.shape != rows.shape or place.dtype != rows.dtype:
            raise ShapeError(
                f"{rows.dtype} {list(tensor.shape)} differs from the first expert's {place.dtype} {list(place.shape)}",
                tensor=name,
            )
        place.copy_(rows)

    @property
    def is_complete(self) -> bool:
        """Whether every expert has every part; quicker than `missing`."""
        if self._form is None:
            return False
        return all(self._counts[part] == self.names.count * len(_PROJECTIONS) for part in _PARTS[self._form])

    def missing(self) -> list[str]:
        """Full names of what has not come, in the order of experts."""
        if self.is_complete:
            return []
        return [
            self._name(expert, projection, part)
            for expert in range(self.names.first, self.names.first + self.names.count)
            for projection in _PROJECTIONS
            for part in _PARTS[self._form or "plain"]
            if (expert, projection, part) not in self._seen
        ]

    def require_no_more(self) -> None:
        """UnknownTensorError for a part that weights of this form do not have, a scale beside plain ones say."""
        for expert, projection, part in sorted(self._seen):
            if part not in _PARTS[self._form or "plain"]:
                raise UnknownTensorError(
                    f"experts that are stored as {self._form} have no such part",
                    tensor=self._name(expert, projection, part),
                    remedy="check that config.json belongs to these weights",
                )

    def take(self, projection: Literal["gate_up", "down"], part: str) -> Tensor:
        """A stack, which is the caller's now; gate's rows come first."""
        return self._stacks.pop((projection == "down", part))

    @property
    def name(self) -> str:
        """Of all experts of the layer, for messages."""
        return f"{self._prefix}mlp.experts"

    def check_shapes(self) -> None:
        """ShapeError for a `weight_shape` that does not say what the packed words hold."""
        for (expert, projection), shape in self._shapes.items():
            stack = self._stacks[projection == "down_proj", "weight_packed"]
            rows = stack.shape[1] if projection == "down_proj" else stack.shape[1] // 2
            if shape != [rows, stack.shape[2] * CODES_PER_WORD]:
                raise ShapeError(
                    f"weight_shape is {shape}, but the packed words hold {[rows, stack.shape[2] * CODES_PER_WORD]}",
                    tensor=self._name(expert, projection, "weight_shape"),
                )

    def _note_form(self, part: str, tensor: Tensor, name: str) -> None:
        form: ExpertForm
        if part == "weight_packed":
            form = "int4"
        elif part == "weight":
            form = "fp8" if tensor.dtype == torch.float8_e4m3fn else "plain"
        else:
            return
        if self._form not in (None, form):
            raise UnsupportedError(
                f"the expert is stored as {form}, others of its layer as {self._form}",
                tensor=name,
                remedy="use one format for all routed experts of a layer",
            )
        self._form = form

    def _stack(self, projection: str, part: str, rows: Tensor) -> Tensor:
        key = (projection == "down_proj", part)
        if key not in self._stacks:
            num_rows = rows.shape[0] * (1 if projection == "down_proj" else 2)
            self._stacks[key] = torch.empty(self.names.count, num_rows, rows.shape[1], dtype=rows.dtype)
        return self._stacks[key]

    def _name(self, expert: int, projection: str, part: str) -> str:
        return f"{self._prefix}mlp.experts.{expert}.{projection}.{part}"
