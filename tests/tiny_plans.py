"""Plans from tiny configs and recipes written in the test: headers alone, no file is made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tiny_checkpoints import CONFIGS, tiny_config

from memopt.compressor.checkpoint.checkpoint import Checkpoint, StoredTensor
from memopt.compressor.checkpoint.model_config import parse_config
from memopt.compressor.checkpoint.skeleton import skeleton_checkpoint
from memopt.compressor.checkpoint.source_tensor import SourceScan, SourceTensor, scan_source
from memopt.compressor.families.registry import family_of
from memopt.compressor.families.roles import TensorSpec
from memopt.compressor.families.text_config import parse_text_config
from memopt.compressor.plan import Plan, PlanOptions, build_plan
from memopt.compressor.recipe import Recipe, load_recipe
from memopt.manifests.dtypes import tensor_size_bytes

EVERY_FAMILY = ["glm_moe_dsa", "glm4_moe", "kimi_k2", "kimi_k25", "deepseek_v3"]
INT4_EXPERTS = {"roles": ["routed_expert"], "format": {"type": "int4"}}


def checkpoint_of(config: dict[str, Any]) -> Checkpoint:
    return skeleton_checkpoint(parse_config(json.dumps(config).encode()))


def tiny(name: str, **changes: Any) -> Checkpoint:
    """The skeleton of a tiny checkpoint; `changes` as in `tiny_config`."""
    return checkpoint_of(tiny_config(name, **changes))


def published(name: str) -> Checkpoint:
    """The skeleton of a published checkpoint, by its config's name."""
    return checkpoint_of(json.loads((CONFIGS / f"{name}.json").read_text()))


def scan(checkpoint: Checkpoint) -> SourceScan:
    return scan_source(checkpoint, family_of(checkpoint.config), parse_text_config(checkpoint.config))


def source_of(checkpoint: Checkpoint, name: str) -> SourceTensor:
    """The logical tensor `name`; the checkpoint must be without problems."""
    found = scan(checkpoint)
    assert found.problems == (), [str(problem) for problem in found.problems]
    (source,) = [source for source in found.tensors if source.spec.name == name]
    return source


def specs_of(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    family, text = family_of(checkpoint.config), parse_text_config(checkpoint.config)
    return {spec.name: spec for spec in family.expected(text)}


def with_tensor(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> Checkpoint:
    """`checkpoint` with a tensor added or replaced."""
    tensor = StoredTensor(name, "model.safetensors", dtype, shape, 0, tensor_size_bytes(dtype, shape))
    return replace(checkpoint, tensors=checkpoint.tensors | {name: tensor})


def without_tensor(checkpoint: Checkpoint, *names: str) -> Checkpoint:
    return replace(checkpoint, tensors={name: t for name, t in checkpoint.tensors.items() if name not in names})


def recipe(*rules: dict[str, Any], **fields: Any) -> Recipe:
    """A recipe for every family: `rules`, and the rest BF16 unless `fields` say otherwise."""
    table = {"name": "test", "description": "of a test", "families": EVERY_FAMILY, "default": "bf16"}
    return Recipe.model_validate(table | {"rules": rules} | fields)


def plan_of(checkpoint: Checkpoint, by: Recipe | str, **options: Any) -> Plan:
    return build_plan(checkpoint, load_recipe(by) if isinstance(by, str) else by, PlanOptions(**options))


def published_plan(config: str, recipe_name: str) -> Plan:
    """The plan for a published checkpoint. Not kept: so many live objects would slow the tests after it."""
    return plan_of(published(config), recipe_name)
