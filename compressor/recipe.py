"""Recipes: which role gets which format. YAML from outside, checked by pydantic, unknown keys refused."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from memopt.compressor.families.registry import FAMILIES
from memopt.compressor.families.roles import Role, TensorSpec
from memopt.compressor.kv_cache_choice import KvCacheChoice
from memopt.compressor.quality_gate import QualityGate
from memopt.compressor.safe_pattern import compile_pattern
from memopt.compressor.share import Share
from memopt.compressor.strict_table import StrictTable
from memopt.errors import RecipeError
from memopt.kernels.int4_spec import ErrorNorm, ScaleSearch
from memopt.manifests.open_file import open_regular, read_exactly

MAX_RECIPE_SIZE_BYTES = 2**18
MAX_NESTING = 32
DEFAULT_RECIPES = {
    "glm_moe_dsa": "glm-5.2-int4",
    "glm4_moe": "glm-4.7-int4",
    "kimi_k2": "kimi-k2-int4",
    "deepseek_v3": "kimi-k2-int4",
    "kimi_k25": "kimi-k2.6",
}

Engine = Literal["vllm", "sglang", "transformers"]
GroupSize = Literal[32, 64, 128, "channel"]
QuantizeMethod = Literal["rtn", "weighted", "gptq"]
CALIBRATED_METHODS = ("weighted", "gptq")
DEFAULT_DAMPING = 0.01
DEFAULT_MAX_FALLBACK = 0.01


class Int4Format(StrictTable):
    """Symmetric INT4, compressed-tensors pack-quantized. `group_size`: weights a scale; `norm`: error exponent.

    `method`: rtn (rounding, no data), or from calibration: weighted (rounding under scales whose search is weighted by
    the inputs) or gptq (a solve on top). `damping`: share of the mean diagonal of the inputs' second moments that is
    added to them. `max_fallback`: the largest share of modules that may end with a lesser method.
    """

    type: Literal["int4"]
    method: QuantizeMethod = "rtn"
    group_size: GroupSize = 32
    scale: ScaleSearch = "mse-signed"
    norm: ErrorNorm = "2"
    damping: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    max_fallback: Share | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_calibration(cls, table: Any) -> Any:
        if isinstance(table, dict) and table.get("method") in CALIBRATED_METHODS:
            return {"damping": DEFAULT_DAMPING, "max_fallback": DEFAULT_MAX_FALLBACK, **table}
        return table

    @model_validator(mode="after")
    def _method_fits(self) -> Int4Format:
        if not self.is_calibrated:
            if self.damping is not None or self.max_fallback is not None:
                raise ValueError("damping and max_fallback go with method: weighted or gptq")
        elif self.damping is None or self.max_fallback is None:
            raise ValueError(f"method {self.method} needs damping and max_fallback: leave them out, or give numbers")
        elif self.scale == "absmax" or self.norm != "2":
            raise ValueError(f"method {self.method} needs scale: mse or mse-signed, and norm: 2")
        return self

    @property
    def is_calibrated(self) -> bool:
        """Whether its codes follow from calibration data."""
        return self.method in CALIBRATED_METHODS

    @field_validator("norm", mode="before")
    @classmethod
    def _norm_as_text(cls, value: Any) -> Any:
        return {2: "2", 2.4: "2.4"}.get(value, value) if isinstance(value, int | float) else value

    @property
    def weights_per_scale(self) -> int | None:
        """The group size in weights, or None for one scale a row."""
        return None if self.group_size == "channel" else int(self.group_size)


class NativeInt4Format(StrictTable):
    """INT4 that the source has already, in groups of `group_size` weights, byte for byte; anything else is refused."""

    type: Literal["native-int4"]
    group_size: GroupSize = 32


class Bf16Format(StrictTable):
    """BF16: FP8 and INT4 are dequantized, BF16 and F32 are copied, F16 and F64 are refused."""

    type: Literal["bf16"]


class KeepFormat(StrictTable):
    """Whatever the source has, byte for byte."""

    type: Literal["keep"]


Format = Int4Format | NativeInt4Format | Bf16Format | KeepFormat
TargetFormat = Annotated[Format, Field(discriminator="type")]


class Rule(StrictTable):
    """The tensors of `roles` whose logical names fully match one of `names` (all, if empty) get `format`."""

    roles: tuple[Role, ...] = ()
    names: tuple[str, ...] = ()
    format: TargetFormat

    @field_validator("format", mode="before")
    @classmethod
    def _bare_type(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @field_validator("names")
    @classmethod
    def _patterns_compile(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            compile_pattern(name)
        return names

    @model_validator(mode="after")
    def _selects_something(self) -> Rule:
        if not self.roles and not self.names:
            raise ValueError("a rule needs roles or names")
        return self

    def matches(self, spec: TensorSpec) -> bool:
        if self.roles and spec.role not in self.roles:
            return False
        return not self.names or any(re.fullmatch(name, spec.name) for name in self.names)

    def describe(self) -> str:
        parts = [f"roles {', '.join(self.roles)}"] if self.roles else []
        return " and ".join([*parts, f"names {', '.join(self.names)}"] if self.names else parts)


class Recipe(StrictTable):
    """Which role gets which format: the first rule that matches, else `default`.

    `engines`: the engines whose lint must pass. `tensor_parallel`: the degree that the release must divide by.
    `kv_cache`: scales of the KV cache that the release brings along. `gate`: what it must reach to be signed.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")
    description: str
    families: tuple[str, ...] = Field(min_length=1)
    rules: tuple[Rule, ...] = ()
    default: TargetFormat
    engines: tuple[Engine, ...] = ()
    tensor_parallel: int = Field(1, ge=1, strict=True)
    kv_cache: KvCacheChoice | None = None
    gate: QualityGate | None = None

    @field_validator("default", mode="before")
    @classmethod
    def _bare_default(cls, value: Any) -> Any:
        return {"type": value} if isinstance(value, str) else value

    @field_validator("families")
    @classmethod
    def _known_families(cls, families: tuple[str, ...]) -> tuple[str, ...]:
        unknown = sorted(set(families) - set(FAMILIES))
        if unknown:
            raise ValueError(f"unknown family {', '.join(unknown)}; known: {', '.join(sorted(FAMILIES))}")
        return families

    @property
    def needs_calibration(self) -> bool:
        """Whether a release of it needs calibration data: for a format's method, or for scales of the KV cache."""
        formats = [rule.format for rule in self.rules] + [self.default]
        is_calibrated = any(isinstance(form, Int4Format) and form.is_calibrated for form in formats)
        return is_calibrated or (self.kv_cache is not None and self.kv_cache.scales == "calibrated")

    def format_of(self, spec: TensorSpec) -> Format:
        """The format that the first matching rule gives `spec`."""
        for rule in self.rules:
            if rule.matches(spec):
                return rule.format
        return self.default


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        seen: set[str] = set()
        for key in keys:
            if not isinstance(key, str) or key in seen:
                raise yaml.YAMLError(f"key {key!r} is not a string or appears twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _check_events(text: str, file: str) -> None:
    """Refuse what makes a small file cost without bound: aliases that expand, and deep nesting."""
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):
            raise RecipeError("YAML aliases are not read", file=file, remedy="write the rules out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_NESTING:
            raise RecipeError(f"is nested more than {MAX_NESTING} deep", file=file)


def _check_values(value: Any, place: str, file: str) -> None:
    """Refuse a key without a value, and true and false.

    `gate:` alone, its limits indented wrongly, must not mean that there is no gate, nor `kl_max: yes` a limit of 1.
    """
    if place and (value is None or isinstance(value, bool)):
        fault = "has no value" if value is None else "a number or a word is needed, not true or false"
        raise RecipeError(f"{place}: {fault}", file=file, remedy="write a value, or leave the line out")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, entry in entries:
        _check_values(entry, f"{place}.{name}" if place else str(name), file)


def parse_recipe(raw: bytes, file: str) -> Recipe:
    """Parse recipe YAML; RecipeError naming the field that is wrong."""
    try:
        text = raw.decode("utf-8")
        _check_events(text, file)
        table = yaml.load(text, Loader=_UniqueKeyLoader)
        _check_values(table, "", file)
        return Recipe.model_validate(table)
    except ValidationError as problem:
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "recipe"
        raise RecipeError(f"{field}: {first['msg']}", file=file, remedy="see docs/recipes.md") from None
    # PyYAML's constructors leak these for a bad `!!int`, `!!bool` or `!!timestamp`.
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError) as problem:
        reason = " ".join(str(problem).split()) or type(problem).__name__
        raise RecipeError(f"is not a recipe: {reason}", file=file) from None


def shipped_recipe_names() -> tuple[str, ...]:
    """Names of the recipes in the package."""
    entries = resources.files("memopt.recipes").iterdir()
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in entries if entry.name.endswith(".yaml")))


def load_recipe(name_or_path: str) -> Recipe:
    """A shipped recipe by name, or a YAML file by path; RecipeError listing the shipped ones if there is neither."""
    if name_or_path in shipped_recipe_names():
        file = f"{name_or_path}.yaml"
        return parse_recipe(resources.files("memopt.recipes").joinpath(file).read_bytes(), file)
    path = Path(name_or_path)
    if not os.path.exists(path):
        raise RecipeError(
            f"there is no recipe {name_or_path!r}",
            remedy=f"shipped: {', '.join(shipped_recipe_names())}; or name a YAML file",
        )
    with open_regular(path) as (descriptor, status):
        if status.st_size > MAX_RECIPE_SIZE_BYTES:
            raise RecipeError(f"{status.st_size:,} bytes, at most {MAX_RECIPE_SIZE_BYTES:,} are read", file=path.name)
        return parse_recipe(read_exactly(descriptor, MAX_RECIPE_SIZE_BYTES, 0), path.name)
