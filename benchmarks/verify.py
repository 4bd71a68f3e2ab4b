"""`memopt verify` against coreutils' sha256sum and plain hashlib over the same bytes, in one run.

    python benchmarks/verify.py [--gib 1] [--files 4] [--folder DIR] [--rounds 3]

Wanted, per core: at least 1.2 GB/s (with SHA instructions), at least 5x sha256sum, at most 1.05x of hashlib's time;
start-up below 0.2 s, peak memory below 150 MiB, 2 jobs at least 1.7x one where two cores are free. Rates are bytes a
second of CPU time, so that other work on the machine matters less; the rounds are interleaved and the best one counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from memopt.manifests.keys import generate_private_key
from memopt.manifests.safetensors_header import TensorHeader, render_header
from memopt.manifests.safetensors_index import INDEX_NAME, render_index
from memopt.manifests.sign import SignOptions, sign_release
from memopt.manifests.signer import KeySigner

GB = 1e9
MEMOPT = str(Path(sysconfig.get_path("scripts")) / "memopt")
HASHLIB = """
import hashlib, sys
buffer = memoryview(bytearray(2**20))
for name in sys.argv[1:]:
    state = hashlib.sha256()
    with open(name, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            state.update(buffer[:size])
    print(state.hexdigest(), name)
"""
PEAK = """
from memopt.cli.main import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@dataclass(frozen=True)
class Usage:
    """What a process took."""

    wall_seconds: float
    cpu_seconds: float


def measure(arguments: list[str], folder: Path) -> Usage:
    """Run a command to its end; RuntimeError if it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{arguments[:2]} ended with {process.returncode}")
    return Usage(wall, usage.ru_utime + usage.ru_stime)


def write_release(folder: Path, size_bytes: int, num_files: int) -> int:
    """A release of random bytes in `num_files` weight files; returns its size in bytes."""
    folder.mkdir()
    weight_map: dict[str, str] = {}
    each = size_bytes // num_files // 4096 * 4096
    for number in range(1, num_files + 1):
        name = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        tensor = TensorHeader(f"layers.{number}.weight", "U8", (each,), 0, each)
        weight_map[tensor.name] = name
        with open(folder / name, "wb") as file:
            file.write(render_header([tensor], {"format": "pt"}))
            for start in range(0, each, 2**24):
                file.write(os.urandom(min(2**24, each - start)))
    (folder / INDEX_NAME).write_bytes(render_index(weight_map, each * num_files))
    (folder / "config.json").write_text('{"model_type": "glm_moe_dsa"}')
    return sum(path.stat().st_size for path in folder.iterdir())


def best(usages: list[Usage]) -> Usage:
    return Usage(
        min(usage.wall_seconds for usage in usages),
        min(usage.cpu_seconds for usage in usages),
    )


def peak_bytes(verify: list[str]) -> int:
    """Peak resident memory of a verification, told by itself: a child's ru_maxrss includes its parent's."""
    code = f"import sys; sys.argv = {['memopt', *verify[1:]]!r}\n{PEAK}"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1]) * 1024


def report(size: int, num_files: int, num_rounds: int, found: dict[str, Usage]) -> None:
    """Print what every command took, and the ratios."""
    print(f"{size / 2**30:.2f} GiB in {num_files} files, best of {num_rounds}; {os.cpu_count()} cores")
    for label, usage in found.items():
        hashes = label in {"verify", "verify 2 jobs", "hashlib", "sha256sum"}
        rate = f"{size / GB / usage.cpu_seconds:6.2f} GB/s of CPU, " if hashes else " " * 21
        print(f"{label:<15} {rate}{usage.cpu_seconds:7.3f} s CPU, {usage.wall_seconds:7.3f} s wall")
    one, plain, quick = found["verify"], found["hashlib"], found["verify --quick"]
    print(f"verify / sha256sum     {found['sha256sum'].cpu_seconds / one.cpu_seconds:5.2f}x as fast (wanted >= 5)")
    print(f"hashlib / sha256sum    {found['sha256sum'].cpu_seconds / plain.cpu_seconds:5.2f}x as fast (the ceiling)")
    print(f"verify / hashlib       {one.cpu_seconds / plain.cpu_seconds:5.3f} of its CPU (wanted <= 1.05)")
    net = (one.cpu_seconds - quick.cpu_seconds) / (plain.cpu_seconds - found["python"].cpu_seconds)
    print(f"  without start-up     {net:5.3f}")
    print(f"2 jobs / 1             {one.wall_seconds / found['verify 2 jobs'].wall_seconds:5.2f}x (wanted >= 1.7)")
    print(f"start-up               {quick.cpu_seconds:5.3f} s of CPU, {quick.wall_seconds:5.3f} s of wall time: all")
    print("                       of a --quick verification (wanted < 0.2)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: the temporary folder)")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memopt-bench-", dir=arguments.folder) as name:
        work = Path(name)
        release = work / "release"
        write_release(release, int(arguments.gib * 2**30), arguments.files)
        key = generate_private_key()
        (work / "key.pub").write_bytes(key.public_key.pem)
        started = time.perf_counter()
        signed = sign_release(release, [KeySigner(key)], SignOptions(identity="benchmark"))
        sign_seconds = time.perf_counter() - started
        size = signed.size_bytes
        verify = [MEMOPT, "verify", str(release), "--key", str(work / "key.pub")]
        files = sorted(path.name for path in release.iterdir() if path.name != "model.sig")
        commands = {
            "verify": [*verify, "--jobs", "1"],
            "verify 2 jobs": [*verify, "--jobs", "2"],
            "hashlib": [sys.executable, "-S", "-c", HASHLIB, *files],
            "sha256sum": ["sha256sum", "--quiet", "-c", "SHA256SUMS"],
            "start-up": [MEMOPT, "verify", "--help"],
            "verify --quick": [*verify, "--quick", "--jobs", "1"],
            "python": [sys.executable, "-c", "pass"],
        }
        rounds: dict[str, list[Usage]] = {label: [] for label in commands}
        for _ in range(arguments.rounds):
            for label, command in commands.items():
                rounds[label].append(measure(command, release))
        found = {label: best(usages) for label, usages in rounds.items()}
        peak = peak_bytes(verify)
    report(size, signed.num_files, arguments.rounds, found)
    print(f"sign                   {size / GB / sign_seconds:5.2f} GB/s of wall time (two digests of every byte)")
    print(f"peak memory            {peak / 2**20:5.0f} MiB (wanted < 150)")


if __name__ == "__main__":
    main()
