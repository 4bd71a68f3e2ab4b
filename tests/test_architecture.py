"""The shape of the code: imports go one way, heavy libraries wait until they are needed, no module is long."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ["memopt", "compressor", "kernels", "manifests", "runtime", "recipes"]
MAX_LINES = 400
BASE = {"memopt", "memopt.errors", "memopt.version"}
# What each folder may import of this project. Later folders are bound before they exist.
MAY_IMPORT = {
    "kernels": {"memopt.kernels"},
    "manifests": {"memopt.manifests"},
    "recipes": {"memopt.recipes"},
    "compressor": {"memopt.compressor", "memopt.kernels", "memopt.manifests", "memopt.recipes", "memopt.runtime"},
    "runtime": {"memopt.runtime", "memopt.kernels", "memopt.manifests"},
    "memopt": set(),
}
# The torch implementations; everything else in memopt starts without it.
TORCH_MODULES = ("_reference", "_device", "_triton")
# Everything in these needs torch.
TORCH_PACKAGES = (
    *(f"memopt.kernels.{name}" for name in ("attention", "calibration", "device", "gemm", "kv_cache", "rows")),
    "memopt.compressor.calibrate",
    "memopt.compressor.evaluate",
    "memopt.runtime",
)
NEVER = {"transformers", "compressed_tensors", "pickle", "marshal", "shelve", "dill", "joblib", "vllm", "sglang"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "memopt" else ("memopt", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Module name -> file, of everything that is installed."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {module_name(path): path for path in paths}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_nodes(tree: ast.AST, *, only_at_start: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; `only_at_start`: those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif only_at_start and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)):
            continue
        else:
            yield from import_nodes(node, only_at_start=only_at_start)


@cache
def imports(module: str, *, only_at_start: bool) -> frozenset[str]:
    """Modules that `module` imports, as dotted names; `from package import submodule` counts as the submodule."""
    found: set[str] = set()
    for node in import_nodes(ast.parse(sources()[module].read_text()), only_at_start=only_at_start):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{module} has a relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(sources())
            found |= submodules or {node.module}
    return frozenset(found)


def folder_of(module: str) -> str:
    relative = sources()[module].relative_to(ROOT)
    is_cli = relative.parts[:2] in {("memopt", "cli"), ("memopt", "__main__.py")}
    return "cli" if is_cli else relative.parts[0]


def in_torch_package(module: str) -> bool:
    return any(module.startswith(f"{package}.") for package in TORCH_PACKAGES)


ALL = sorted(sources())


def test_the_folders_are_found() -> None:
    assert {"memopt", "memopt.cli.main", "memopt.compressor.plan", "memopt.kernels.layout"} <= set(ALL)
    assert imports("memopt.cli.plan", only_at_start=False) >= {"memopt.compressor.estimate", "memopt.errors"}
    assert "memopt.compressor.estimate" not in imports("memopt.cli.plan", only_at_start=True)


@pytest.mark.parametrize("module", ALL)
def test_imports_go_one_way(module: str) -> None:
    folder = folder_of(module)
    if folder == "cli":
        return
    for name in imports(module, only_at_start=folder == "memopt"):
        if name == "memopt" or name.startswith("memopt."):
            package = ".".join(name.split(".")[:2])
            assert package in MAY_IMPORT[folder] | BASE, f"{module} imports {name}"


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        for name in imports(module, only_at_start=True):
            if name in sources():
                visit(name, (*path, module))
        done.add(module)

    for module in ALL:
        visit(module, ())


@pytest.mark.parametrize("module", ALL)
def test_torch_waits_until_it_is_needed(module: str) -> None:
    if in_torch_package(module) or (folder_of(module) == "kernels" and module.endswith(TORCH_MODULES)):
        return
    top = {name.split(".")[0] for name in imports(module, only_at_start=True)}
    assert not top & {"torch", "triton"}, module
    started = imports(module, only_at_start=True)
    reached = {name for name in started if name.endswith(TORCH_MODULES) or in_torch_package(name)}
    assert not reached, f"{module} imports {reached} at its start"


@pytest.mark.parametrize("module", ALL)
def test_nothing_that_runs_foreign_code_or_belongs_to_tests(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(module, only_at_start=False)} & NEVER
    if folder_of(module) == "manifests":
        assert not {name.split(".")[0] for name in imports(module, only_at_start=True)} & {"numpy", "torch", "numba"}


@pytest.mark.parametrize("module", ALL)
def test_a_module_says_what_it_is_and_is_not_long(module: str) -> None:
    text = sources()[module].read_text()
    assert len(text.splitlines()) <= MAX_LINES, module
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_tests_and_benchmarks_are_not_long_either() -> None:
    paths = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in paths if (n := len(path.read_text().splitlines())) > MAX_LINES}
    assert long == {}


def test_every_folder_that_is_there_is_installed() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(table["tool"]["setuptools"]["packages"])
    found = {module_name(path / "__init__.py") for path in {path.parent for path in sources().values()}}
    assert packages == found
