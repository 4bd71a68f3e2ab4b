"""CPU time of a verifying load, against verifying first and loading with safetensors' load_file afterwards.

    python benchmarks/load.py [--gib 1] [--runs 5] [--jobs 1] [--folder DIR]

Every figure is the least CPU time of several runs, each in a process of its own, taken in turns in one go; page cache
warm. The same service is compared with the same: "into the model" fills tensors that exist already, as an engine does
(wanted: at most 0.95x); "private" gives tensors in memory of their own. "mapped" is what load_file returns, one byte
of each page touched: such tensors change when the file does, and so are no alternative to a verifying load.
"""

from __future__ import annotations

import argparse
import json
import mmap
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from memopt.manifests.release import Release

NUM_SHARDS = 2
PAGE_SIZE_BYTES = 4096
KEY_NAME = "key.pub"
HASH = "hashlib alone"
THEN_MAPPED = "verify, then load_file, mapped"
THEN_PRIVATE = "verify, then load_file, private"
THEN_INTO = "verify, then load_file, into the model"
VERIFYING = "verifying load, private"
VERIFYING_INTO = "verifying load, into the model"
# Each way, and the other one that gives the same.
WAYS = {
    HASH: "",
    THEN_MAPPED: "",
    THEN_PRIVATE: "",
    VERIFYING: THEN_PRIVATE,
    THEN_INTO: "",
    VERIFYING_INTO: THEN_INTO,
}


def make_release(folder: Path, size_bytes: int) -> Path:
    """A signed release of random BF16 matrices in two shards, and its public key beside it."""
    import torch
    from safetensors.torch import save_file

    from memopt.manifests.keys import generate_private_key
    from memopt.manifests.safetensors_index import INDEX_NAME, render_index
    from memopt.manifests.sign import SignOptions, sign_release
    from memopt.manifests.signer import KeySigner

    release = folder / "release"
    release.mkdir()
    (release / "config.json").write_text('{"model_type": "benchmark"}')
    rows = size_bytes // NUM_SHARDS // 2 // 16 // 2048
    weight_map = {}
    for number in range(NUM_SHARDS):
        name = f"model-{number + 1:05}-of-{NUM_SHARDS:05}.safetensors"
        tensors = {f"layers.{number}.{n}": torch.randn(rows, 2048).to(torch.bfloat16) for n in range(16)}
        save_file(tensors, release / name)
        weight_map |= dict.fromkeys(tensors, name)
    (release / INDEX_NAME).write_bytes(render_index(weight_map, size_bytes))
    private = generate_private_key()
    sign_release(release, [KeySigner(private)], SignOptions(identity="benchmark"))
    (folder / KEY_NAME).write_bytes(private.public_key.pem)
    return release


def _verify(folder: Path, jobs: int) -> None:
    from memopt.manifests.keys import load_public_key
    from memopt.manifests.policy import policy_for_key
    from memopt.manifests.verify import VerifyOptions, verify_release

    policy = policy_for_key(load_public_key(folder / KEY_NAME))
    if not verify_release(folder / "release", policy, VerifyOptions(jobs=jobs)).is_ok:
        raise SystemExit("the release does not verify")


def _hash(folder: Path) -> None:
    import hashlib

    buffer = memoryview(bytearray(2**20))
    for path in sorted((folder / "release").glob("*.safetensors")):
        state = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                state.update(buffer[:size])


def _load_file(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "release").glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def _touched(tensors: dict[str, torch.Tensor]) -> object:
    import torch

    return tensors, [tensor.view(torch.uint8).view(-1)[::PAGE_SIZE_BYTES].sum() for tensor in tensors.values()]


def _into(model: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> object:
    for name, tensor in tensors.items():
        model[name].copy_(tensor)
    return model


def _open(folder: Path, jobs: int) -> Release:
    from memopt.manifests.release import open_release

    return open_release(folder / "release", key=folder / KEY_NAME, jobs=jobs)


def _run(way: str, folder: Path, jobs: int, model: dict[str, torch.Tensor]) -> object:
    if way == HASH:
        return _hash(folder)
    if way == VERIFYING:
        with _open(folder, jobs) as release:
            return release.load()
    if way == VERIFYING_INTO:
        with _open(folder, jobs) as release:
            release.load_into(model)
        return model
    _verify(folder, jobs)
    loaded = _load_file(folder)
    if way == THEN_INTO:
        return _into(model, loaded)
    return {name: t.clone() for name, t in loaded.items()} if way == THEN_PRIVATE else _touched(loaded)


def _warm_memory(size_bytes: int) -> None:
    """Touch as much memory as will be used and give it back: the host of a virtual machine backs it only then."""
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, size_bytes, PAGE_SIZE_BYTES):
            memory[offset] = 1


def measure(way: str, folder: Path, jobs: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds) in this process; libraries are imported and the model's memory is made before."""
    import torch

    import memopt.manifests.release
    import memopt.manifests.trust
    import memopt.manifests.verify  # noqa: F401

    torch.set_num_threads(jobs)
    loaded = _load_file(folder)
    model = {name: torch.ones_like(tensor) for name, tensor in loaded.items()} if "model" in way else {}
    _warm_memory(sum(tensor.nbytes for tensor in loaded.values()))
    del loaded
    cpu, wall = time.process_time(), time.perf_counter()
    kept = _run(way, folder, jobs, model)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    del kept
    return cpu, wall


def main() -> None:
    """Print CPU seconds and ratios."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--gib", type=float, default=1.0, help="size of the weights (default 1 GiB)")
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--jobs", type=int, default=1, help="threads of verification and of the verifying load")
    options.add_argument("--folder", type=Path, help="where to make the release (default: a temporary folder)")
    options.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure, chosen.folder, chosen.jobs)))
        return
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        release = make_release(folder, int(chosen.gib * 2**30))
        size_bytes = sum(path.stat().st_size for path in release.glob("*.safetensors"))
        best: dict[str, tuple[float, float]] = {way: (float("inf"), float("inf")) for way in WAYS}
        for _ in range(chosen.runs):
            for way in WAYS:
                command = [sys.executable, __file__, "--measure", way, "--folder", name, "--jobs", str(chosen.jobs)]
                cpu, wall = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                best[way] = (min(best[way][0], cpu), min(best[way][1], wall))
    print(f"{size_bytes / 2**30:.2f} GiB ({size_bytes / 1e9:.2f} GB), {chosen.jobs} threads, best of {chosen.runs}")
    print(f"{'':<38} {'CPU s':>7} {'GB a CPU s':>11} {'wall s':>7}  CPU compared")
    for way, other in WAYS.items():
        cpu, wall = best[way]
        ratio = f"{cpu / best[other][0]:.2f}x of {other}" if other else ""
        print(f"{way:<38} {cpu:>7.3f} {size_bytes / 1e9 / cpu:>11.2f} {wall:>7.3f}  {ratio}")


if __name__ == "__main__":
    main()
