"""The stored tensors of one layer while they come in, and who has taken which."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from memopt.errors import MissingTensorError, UnknownTensorError
from memopt.runtime.weights.expert_tensors import ExpertTensors
from memopt.runtime.weights.layer_names import LayerNames

_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(\w+)")
# Parts of a quantized weight besides its codes.
INT4_PARTS = ("weight_scale", "weight_shape")
FP8_SCALES = ("weight_scale_inv", "weight_scale")


class LayerTensors:
    """Tensors by their name below `prefix` ("model.layers.3."); routed experts go straight into their stacks.

    `add` takes them as they come, `missing` says what is not there yet, blocks `take` what they need, and `finish`
    refuses what nobody took.
    """

    def __init__(self, prefix: str, names: LayerNames) -> None:
        self.prefix = prefix
        self._names = names
        self._tensors: dict[str, Tensor] = {}
        self._experts = None if names.experts is None else ExpertTensors(prefix, names.experts)

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep `tensor`, or a copy of a view of a larger memory. Raises UnknownTensorError for a name twice, and what
        ExpertTensors.add raises.
        """
        expert = _EXPERT.fullmatch(name)
        if expert is not None and self._experts is not None:
            self._experts.add(int(expert[1]), expert[2], expert[3], tensor)
            return
        if name in self._tensors:
            raise UnknownTensorError("the tensor is there twice", tensor=self.prefix + name)
        # A view would keep all that was read together in memory.
        is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        self._tensors[name] = tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)

    def missing(self) -> list[str]:
        """Full names of tensors that the model needs and that have not been added, in the model's order."""
        found = [f"{module}.weight" for module in self._names.linears if not self._has_weight(module)]
        found += [part for module in self._names.linears for part in self._missing_parts(module)]
        found += [name for name in self._names.vectors if name not in self._tensors]
        found = [self.prefix + name for name in found]
        return found if self._experts is None else found + self._experts.missing()

    @property
    def is_complete(self) -> bool:
        """Whether everything that the model needs has come."""
        return (self._experts is None or self._experts.is_complete) and not self.missing()

    def has(self, name: str) -> bool:
        """Whether a tensor of that name is there and not taken."""
        return name in self._tensors

    def take(self, name: str) -> Tensor:
        """The tensor; it is the caller's now. Raises MissingTensorError."""
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise MissingTensorError("the model needs this tensor, and the weights lack it", tensor=self.prefix + name)
        return tensor

    def take_optional(self, name: str) -> Tensor | None:
        """The tensor if there is one; it is the caller's now."""
        return self._tensors.pop(name, None)

    def take_experts(self) -> ExpertTensors:
        """The stacks of routed experts. Raises MissingTensorError for a layer that has none."""
        experts, self._experts = self._experts, None
        if experts is None:
            raise MissingTensorError("the layer has no routed experts", tensor=f"{self.prefix}mlp.experts")
        return experts

    def finish(self) -> None:
        """Raises UnknownTensorError for tensors that no block took."""
        if self._tensors:
            names = sorted(self._tensors)
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            raise UnknownTensorError(
                f"no block of this model uses the tensor{more}",
                tensor=self.prefix + names[0],
                remedy="check that config.json belongs to these weights",
            )

    def _has_weight(self, module: str) -> bool:
        return f"{module}.weight" in self._tensors or f"{module}.weight_packed" in self._tensors

    def _missing_parts(self, module: str) -> list[str]:
        if f"{module}.weight_packed" in self._tensors:
            return [f"{module}.{part}" for part in INT4_PARTS if f"{module}.{part}" not in self._tensors]
        weight = self._tensors.get(f"{module}.weight")
        if weight is None or weight.dtype != torch.float8_e4m3fn:
            return []
        return [] if any(f"{module}.{part}" in self._tensors for part in FP8_SCALES) else [f"{module}.{FP8_SCALES[0]}"]
