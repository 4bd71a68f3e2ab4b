"""Compiles cases ahead of time, without a GPU: `python -m compiled.build compiled.cases_foo`; prints figures as JSON.

A process of its own, because Triton is either interpreting or compiling, and so that kernels build side by side.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compiled.case import CompileCase
from compiled.sass import inner_loop, parse_instructions, parse_resources

WARP_THREADS = 32
# Pointers are those of whole tensors: 16 bytes divide them.
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Target:
    """A GPU as Triton names it, and the shared memory in bytes that one CTA may have (Triton does not check it)."""

    backend: str
    architecture: int | str
    warp_threads: int
    max_shared_bytes: int


TARGETS = {
    "sm_90": Target("cuda", 90, 32, 232448),
    "sm_100": Target("cuda", 100, 32, 232448),
    "gfx942": Target("hip", "gfx942", 64, 65536),
}


@dataclass(frozen=True)
class Figures:
    """What a compiled case costs. `instructions_per_item`, `load_bits` and `num_local_accesses` are of the inner loop.

    None for AMD, whose disassembly is not counted, and for a case without work items.
    """

    case: str
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    max_shared_bytes: int
    instructions_per_item: float | None
    load_bits: int | None
    min_load_bits: int
    num_local_accesses: int


def compile_case(case: CompileCase, target: Target) -> Any:
    """Triton's compiled kernel. Whatever Triton raises is raised."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    missing = [name for name in names if name not in case.signature and name not in case.constants]
    unknown = (case.signature.keys() | case.constants.keys() | case.aligned) - set(names)
    if missing or unknown:
        raise ValueError(
            f"{case.name}: arguments without a type {missing}, types without an argument {sorted(unknown)}"
        )
    signature = {name: "constexpr" if name in case.constants else case.signature[name] for name in names}
    aligned = {
        (index,): ALIGNED
        for index, name in enumerate(names)
        if name not in case.constants and (case.signature[name].startswith("*") or name in case.aligned)
    }
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.enable_fp_fusion,
    }
    return triton.compile(
        ASTSource(case.kernel, signature, dict(case.constants), aligned),
        target=GPUTarget(target.backend, target.architecture, target.warp_threads),
        options=options,
    )


def _cuobjdump(option: str, cubin: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([str(tool), option, str(cubin)], check=True, capture_output=True, text=True).stdout


def disassemble(kernel: Any) -> tuple[str, str]:
    """The resource line and the SASS of a kernel compiled for NVIDIA."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        return _cuobjdump("--dump-resource-usage", cubin), _cuobjdump("-sass", cubin)


def parse_amdgcn(text: str) -> Mapping[str, int]:
    """The kernel's register and spill counts, from the metadata at the end of AMD assembly; ValueError without them."""
    names = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in names}
    absent = [name for name, match in found.items() if match is None]
    if absent:
        raise ValueError(f"the assembly names no {', '.join(absent)}")
    return {name: int(match[1]) for name, match in found.items() if match is not None}


def measure(case: CompileCase, target_name: str) -> Figures:
    """Compiles `case` for a target of TARGETS and reads what it costs."""
    target = TARGETS[target_name]
    kernel = compile_case(case, target)
    shared = int(kernel.metadata.shared)
    if target.backend == "hip":
        counts = parse_amdgcn(kernel.asm["amdgcn"])
        scratch = counts["private_segment_fixed_size"]
        spilled = max(scratch, 4 * (counts["vgpr_spill_count"] + counts["sgpr_spill_count"]))
        return Figures(
            case.name, target_name, counts["vgpr_count"], spilled, shared, target.max_shared_bytes, None, None, 0, 0
        )
    resource_text, sass_text = disassemble(kernel)
    resources, loop = parse_resources(resource_text), inner_loop(parse_instructions(sass_text))
    per_item = None
    if case.work_items is not None:
        threads = WARP_THREADS if case.unit == "thread-instructions per weight" else 1
        per_item = round(loop.count * case.num_warps * threads / case.work_items, 2)
    return Figures(
        case.name,
        target_name,
        resources.registers,
        resources.spill_bytes,
        shared,
        target.max_shared_bytes,
        per_item,
        loop.widest_load_bits,
        case.min_load_bits,
        loop.num_local_accesses,
    )


def main(module: str) -> None:
    """Prints one JSON object a case and target."""
    for case in importlib.import_module(module).CASES:
        for target in case.targets:
            print("FIGURES " + json.dumps(asdict(measure(case, target))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
