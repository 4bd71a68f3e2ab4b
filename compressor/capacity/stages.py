"""The stages of serving, each planned with its own weights and KV format (docs/design.md, "Words")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memopt.compressor.capacity.kv_bytes import CacheFormat, default_kv_format
from memopt.compressor.capacity.model_shape import ModelShape
from memopt.compressor.capacity.request import CapacityRequest
from memopt.compressor.families.roles import Role
from memopt.compressor.plan import Plan, require_ranks
from memopt.compressor.recipe import load_recipe
from memopt.compressor.tensor_plan import TensorPlan, plan_tensors
from memopt.errors import AlignmentError, UsageError
from memopt.manifests.rank_folders import RankLayout

StageName = Literal["decode", "prefill"]
SOURCE_AS_IT_IS = "copy"


@dataclass(frozen=True)
class Stage:
    """One stage: the recipe that its weights come from, their tensors, and the format of its KV cache."""

    name: StageName
    recipe: str
    tensors: tuple[TensorPlan, ...]
    kv_format: CacheFormat

    @property
    def weight_formats(self) -> tuple[str, ...]:
        """The formats of its Linear weights, routed experts' first."""
        linear = [tensor for tensor in self.tensors if tensor.outputs and tensor.source.spec.is_linear]
        linear.sort(key=lambda tensor: tensor.source.spec.role is not Role.ROUTED_EXPERT)
        return tuple(dict.fromkeys(tensor.output_format for tensor in linear))


def require_stage_divides(stage: Stage, layout: RankLayout) -> None:
    """AlignmentError naming the stage too, unless every tensor of it can be cut over the ranks of `layout`."""
    try:
        require_ranks(stage.tensors, layout)
    except AlignmentError as problem:
        raise AlignmentError(
            f"{stage.name} stage, recipe {stage.recipe}: {problem.message}",
            tensor=problem.tensor,
            remedy=f"{problem.remedy}; or plan the other stage alone (--stage)",
        ) from None


def _has_int4(tensors: tuple[TensorPlan, ...]) -> bool:
    return any(tensor.is_int4 for tensor in tensors)


def _prefill(plan: Plan, request: CapacityRequest) -> Stage:
    name, form = request.prefill_recipe, request.prefill_kv_format or CacheFormat.BF16
    if name is None and not _has_int4(plan.tensors):
        return Stage("prefill", plan.recipe.name, plan.tensors, form)
    recipe = load_recipe(name or SOURCE_AS_IT_IS)
    tensors = plan_tensors(recipe, plan.family, tuple(tensor.source for tensor in plan.tensors))
    return Stage("prefill", recipe.name, tensors, form)


def stages_of(plan: Plan, shape: ModelShape, request: CapacityRequest) -> tuple[Stage, ...]:
    """The stages that `request` asks for.

    RecipeError if the prefill recipe cannot be met, UsageError for a choice about a stage that is not planned.
    """
    choice = request.stage or ("decode" if _has_int4(plan.tensors) else "prefill")
    for name, value, stage in (
        ("prefill recipe", request.prefill_recipe, "prefill"),
        ("KV format of prefill", request.prefill_kv_format, "prefill"),
        ("KV format of decode", request.kv_format, "decode"),
    ):
        if value is not None and choice not in {stage, "both"}:
            raise UsageError(f"a {name}, but only {choice} is planned", remedy=f"use --stage {stage} or both")
    stages: list[Stage] = []
    if choice != "prefill":
        form = request.kv_format or default_kv_format(shape)
        stages.append(Stage("decode", plan.recipe.name, plan.tensors, form))
    if choice != "decode":
        stages.append(_prefill(plan, request))
    return tuple(stages)
