"""Which weights of each layer become INT4, in the order in which calibration comes to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memopt.compressor.families.roles import Role
from memopt.compressor.recipe import Int4Format
from memopt.compressor.tensor_plan import TensorPlan
from memopt.errors import RecipeError

# Modules whose inputs are there together, stage after stage: local name -> where it is in a DecoderLayer.
_STAGES: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "self_attn.q_a_proj": ("attention", "query_rank", "down"),
        "self_attn.q_proj": ("attention", "query"),
        "self_attn.k_proj": ("attention", "key"),
        "self_attn.v_proj": ("attention", "value"),
        "self_attn.kv_a_proj_with_mqa": ("attention", "kv_a"),
    },
    {"self_attn.q_b_proj": ("attention", "query")},
    {"self_attn.o_proj": ("attention", "output")},
    {
        "mlp.gate_proj": ("mlp", "gate_up"),
        "mlp.up_proj": ("mlp", "gate_up"),
        "mlp.shared_experts.gate_proj": ("mlp", "shared", "gate_up"),
        "mlp.shared_experts.up_proj": ("mlp", "shared", "gate_up"),
    },
    {"mlp.down_proj": ("mlp", "down"), "mlp.shared_experts.down_proj": ("mlp", "shared", "down")},
)
NUM_ATTENTION_STAGES = 3
NUM_GATE_UP = 2


@dataclass(frozen=True, slots=True)
class DenseTarget:
    """One Linear of a layer. `weights`: the stored weights that are its rows, in order. `stage`: counts from 0."""

    stage: int
    place: tuple[str, ...]
    weights: tuple[TensorPlan, ...]
    form: Int4Format

    @property
    def label(self) -> str:
        """For the name of its part."""
        return ".".join(self.place)


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """The routed experts of a layer: gate's and up's weights by expert, then down's."""

    gate_up: tuple[tuple[TensorPlan, TensorPlan], ...]
    down: tuple[TensorPlan, ...]
    gate_up_form: Int4Format
    down_form: Int4Format

    @property
    def is_calibrated(self) -> bool:
        """Whether any of them needs data."""
        return self.gate_up_form.is_calibrated or self.down_form.is_calibrated


@dataclass(frozen=True, slots=True)
class LayerTargets:
    """What of one layer becomes INT4; `experts` None where its routed experts do not, or it has none."""

    layer: int
    dense: tuple[DenseTarget, ...]
    experts: ExpertTarget | None

    @property
    def is_calibrated(self) -> bool:
        """Whether any of it needs data; the rest is rounded plainly, as the release will be."""
        has_experts = self.experts is not None and self.experts.is_calibrated
        return has_experts or any(target.form.is_calibrated for target in self.dense)


def layer_targets(tensors: Iterable[TensorPlan], name_prefix: str) -> dict[int, LayerTargets]:
    """By number of layer, of the tensors of a plan whose names start with `name_prefix` + "model.layers.".

    RecipeError for a calibrated weight that calibration does not reach (kv_b_proj, the indexer, heads), and for rows of
    one product (gate and up), or one layer's experts, in different formats, or half of them INT4.
    """
    by_layer: dict[int, list[TensorPlan]] = {}
    for plan in tensors:
        layer = plan.source.spec.layer
        if plan.int4 is None:
            continue
        if layer is None:
            _require_plain(plan)
        else:
            by_layer.setdefault(layer, []).append(plan)
    return {layer: _targets_of(layer, plans, name_prefix) for layer, plans in sorted(by_layer.items())}


def _targets_of(layer: int, plans: Sequence[TensorPlan], name_prefix: str) -> LayerTargets:
    prefix = f"{name_prefix}model.layers.{layer}."
    experts = [plan for plan in plans if plan.source.spec.role is Role.ROUTED_EXPERT]
    places: dict[tuple[int, tuple[str, ...]], list[TensorPlan]] = {}
    for plan in plans:
        if plan.source.spec.role is Role.ROUTED_EXPERT:
            continue
        module = plan.source.spec.module.removeprefix(prefix)
        stage = next((number for number, modules in enumerate(_STAGES) if module in modules), None)
        if stage is None:
            _require_plain(plan)
        else:
            places.setdefault((stage, _STAGES[stage][module]), []).append(plan)
    for (_, place), found in places.items():
        _require_all_rows(place, found)
    dense = tuple(
        DenseTarget(stage, place, tuple(_in_order(found)), _one_form(found))
        for (stage, place), found in sorted(places.items())
    )
    return LayerTargets(layer, dense, _expert_target(experts) if experts else None)


def _expert_target(plans: Sequence[TensorPlan]) -> ExpertTarget:
    by_expert: dict[int, dict[str, TensorPlan]] = {}
    for plan in plans:
        expert = plan.source.spec.expert
        if expert is not None:
            by_expert.setdefault(expert, {})[plan.source.spec.module.rpartition(".")[2]] = plan
    num_experts = plans[0].source.spec.num_experts
    if len(plans) != 3 * num_experts:
        raise RecipeError(
            f"{len(plans)} of {3 * num_experts} weights of the layer's routed experts would be INT4",
            tensor=plans[0].source.spec.name,
            remedy="give all routed experts of a layer to INT4, or none of them",
        )
    rows = [by_expert[expert] for expert in range(num_experts)]
    gate_up = tuple((row["gate_proj"], row["up_proj"]) for row in rows)
    down = tuple(row["down_proj"] for row in rows)
    return ExpertTarget(gate_up, down, _one_form([plan for pair in gate_up for plan in pair]), _one_form(down))


def _in_order(plans: Sequence[TensorPlan]) -> list[TensorPlan]:
    """By name, which puts gate before up."""
    return sorted(plans, key=lambda plan: plan.source.spec.name)


def _require_all_rows(place: tuple[str, ...], plans: Sequence[TensorPlan]) -> None:
    """RecipeError for a gate without its up: they run, and are rounded, as one product."""
    if place[-1] == "gate_up" and len(plans) != NUM_GATE_UP:
        raise RecipeError(
            "would be INT4, but the other of gate and up would not",
            tensor=plans[0].source.spec.name,
            remedy="give gate and up one format",
        )


def _one_form(plans: Sequence[TensorPlan]) -> Int4Format:
    forms = {plan.int4 for plan in plans if plan.int4 is not None}
    if len(forms) > 1:
        raise RecipeError(
            "weights that share their input would be INT4 in different forms",
            tensor=plans[0].source.spec.name,
            remedy="give gate and up, and all routed experts of a layer, one format",
        )
    return forms.pop()


def _require_plain(plan: TensorPlan) -> None:
    if plan.int4 is not None and plan.int4.is_calibrated:
        raise RecipeError(
            f"calibration does not reach {plan.source.spec.role} weights of this kind with method {plan.int4.method}",
            tensor=plan.source.spec.name,
            remedy="give it method rtn, or bf16",
        )
