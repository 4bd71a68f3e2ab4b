"""`import memopt`: what is public, where it comes from, and how little it costs."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import memopt

FUNCTIONS = ["compress", "dequantize", "inspect", "load_recipe", "plan", "plan_config"]
# Modules that cost tens of milliseconds or more.
HEAVY = ["torch", "numpy", "numba", "pydantic", "yaml", "rich", "click", "huggingface_hub", "safetensors", "triton"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_the_names_of_this_version_are_there() -> None:
    names = {"ExitCode", "Inspection", "MemoptError", "Plan", "PlanOptions", "Progress", "Recipe", "RunResult"}
    assert {*names, *FUNCTIONS, "__version__"} <= set(memopt.__all__)
    assert dir(memopt) == sorted(memopt.__all__)


@pytest.mark.parametrize("name", memopt.__all__)
def test_every_name_resolves(name: str) -> None:
    assert getattr(memopt, name) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_typed_and_documented(name: str) -> None:
    function = getattr(memopt, name)
    signature = inspect.signature(function)
    assert inspect.getdoc(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_the_signatures_that_users_call() -> None:
    def parameters(name: str) -> list[str]:
        return list(inspect.signature(getattr(memopt, name)).parameters)

    assert parameters("compress")[:3] == ["source", "out", "recipe"]
    assert {"workers", "progress", "options"} <= set(parameters("compress"))
    assert parameters("plan")[:2] == ["source", "recipe"]
    assert parameters("inspect") == ["source"]
    assert parameters("dequantize")[:2] == ["release", "out"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'memopt' has no attribute 'quantise'"):
        _ = memopt.quantise  # type: ignore[attr-defined]


def test_it_ships_its_types() -> None:
    assert memopt.__file__ is not None
    assert (Path(memopt.__file__).parent / "py.typed").exists()
    assert importlib.util.find_spec("memopt.recipes") is not None


def test_importing_it_loads_nothing_heavy() -> None:
    loaded = run(f"import sys, memopt; print(sorted(set({HEAVY!r}) & set(sys.modules)))")
    assert loaded == "[]"


def test_planning_loads_neither_torch_nor_numba() -> None:
    # A plan needs headers and arithmetic alone, so it starts at once on a machine without a GPU stack.
    loaded = run("import sys, memopt; memopt.plan_config; print([m for m in ('torch', 'numba') if m in sys.modules])")
    assert loaded in {"[]", "['numba']"}
    assert "torch" not in loaded


def test_importing_it_costs_milliseconds() -> None:
    code = "import time; t = time.perf_counter(); import memopt; print(time.perf_counter() - t)"
    # The best of a few: the machine may be busy.
    assert min(float(run(code)) for _ in range(3)) < 0.3
