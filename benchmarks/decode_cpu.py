"""CPU decode speed: memopt on the signed INT4 release against transformers on its dequantized weights.

    python benchmarks/decode_cpu.py [--models tiny wide] [--dtypes bfloat16 float32] [--batches 1 16] [--tokens 48]
                                    [--threads 1] [--rounds 3] [--vllm-python .venv-vllm/bin/python]

`tiny` is examples/tiny-glm5-fp8; `wide` a random DeepSeek-V3 (hidden 1024, 4 layers, 32 experts, 8 a token). Each
system is a process of its own, so that its peak memory is its own; they take turns, so that all see the same machine,
and the best of the rounds counts. Same prompts, greedy; decode steps alone are timed, by the clock and in processor
time, whose ratio says more where other processes run. Wanted: at least 2 times
transformers' tokens a second at batch 1 and 4 times at batch 16, and a lower peak than the BF16 model's. vLLM, on the
same export, runs beside it when its environment is there (`make test-vllm` makes it).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memopt
from memopt.manifests.keys import generate_private_key
from memopt.manifests.signer import KeySigner

ROOT = Path(__file__).parent.parent
SERVER = Path(__file__).parent / "decode_server.py"
TINY = ROOT / "examples" / "tiny-glm5-fp8"
RECIPES = {"tiny": "glm-5.2-int4", "wide": "kimi-k2-int4"}
# 151 million weights in experts. A token uses 38 million of them and 40 million others: about GLM-5.2's shares.
WIDE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
}
WANTED = {1: 2.0, 16: 4.0}


@dataclass(frozen=True)
class Release:
    """A signed INT4 release, the key that signed it, and its dequantized BF16 export."""

    folder: Path
    key: Path
    export: Path


def make_release(name: str, root: Path) -> Release:
    """Compress, sign and dequantize one of the models below the folder `root`."""
    source = TINY
    if name == "wide":
        sys.path.insert(0, str(ROOT / "tests"))
        from tiny_checkpoints import make_checkpoint

        source = make_checkpoint(root / "source", "deepseek-v3-fp8", **WIDE)
        (source / "modeling_custom.py").unlink()
    release = Release(root / "release", root / "release.pub", root / "export")
    memopt.compress(source, release.folder, recipe=RECIPES[name], device="cpu")
    key = generate_private_key()
    memopt.sign_release(release.folder, [KeySigner(key)], memopt.SignOptions(f"bench/{name}", 1))
    release.key.write_bytes(key.public_key.pem)
    memopt.dequantize(release.folder, release.export)
    return release


class Server:
    """A system in its process. `missing` says why it cannot run here, or no longer does."""

    def __init__(self, python: str, system: str, folder: Path, dtype: str, num_threads: int, *rest: str) -> None:
        self.name = system
        self.missing: str | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [python, str(SERVER), system, str(folder), dtype, str(num_threads), *rest]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self._answer()

    def decode(self, batch: int, num_tokens: int) -> dict[str, Any] | None:
        """Seconds, tokens and peak memory of one run; None, and `missing` is set, when the process has ended."""
        if self.missing is not None or self._process.stdin is None:
            return None
        try:
            print(json.dumps({"batch": batch, "num_tokens": num_tokens}), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self.missing = self._last_words()
            return None
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any] | None:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        answer: dict[str, Any] = json.loads(line) if line else {"missing": self._last_words()}
        self.missing = answer.get("missing")
        return answer if self.missing is None else None

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f"exit code {code}: {lines[-1] if lines else ''}"


@dataclass
class Figures:
    """Best seconds by batch, of the clock and of processor time, tokens by batch, and the peak of one system."""

    seconds: dict[int, float] = field(default_factory=dict)
    processor_seconds: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    peak_bytes: int = 0

    def take(self, batch: int, answer: dict[str, Any]) -> None:
        """Note one run."""
        for best, found in (
            (self.seconds, answer["seconds"]),
            (self.processor_seconds, answer["processor_seconds"]),
        ):
            best[batch] = min(best.get(batch, float("inf")), found)
        self.tokens[batch] = answer["tokens"]
        self.peak_bytes = answer["peak_bytes"]


def compare(release: Release, dtype: str, options: argparse.Namespace) -> tuple[dict[str, Figures], dict[str, str]]:
    """All systems on one release in one type: figures, and why others are missing."""
    servers = [
        Server(sys.executable, "memopt", release.folder, dtype, options.threads, str(release.key)),
        Server(sys.executable, "transformers", release.export, dtype, options.threads),
    ]
    missing: dict[str, str] = {}
    if Path(options.vllm_python).exists():
        servers.append(Server(options.vllm_python, "vllm", release.export, dtype, options.threads))
    else:
        missing["vllm"] = f"{options.vllm_python} is not there; `make test-vllm` makes it"
    figures = {server.name: Figures() for server in servers}
    for batch in options.batches:
        for server in servers:
            server.decode(batch, 4)
        for round_number in range(options.rounds):
            # There and back: nobody always runs behind the same neighbour.
            for server in servers if round_number % 2 == 0 else servers[::-1]:
                answer = server.decode(batch, options.tokens)
                if answer is not None:
                    figures[server.name].take(batch, answer)
    for server in servers:
        server.close()
        if server.missing is not None:
            missing[server.name] = server.missing
            del figures[server.name]
    return figures, missing


def report(model: str, dtype: str, figures: dict[str, Figures], options: argparse.Namespace) -> None:
    """One line a batch and system."""
    base = figures.get("transformers")
    if base is None:
        return
    for batch in options.batches:
        num_tokens = batch * (options.tokens - 1)
        for name, found in figures.items():
            ratio = base.seconds[batch] / found.seconds[batch]
            processor_ratio = base.processor_seconds[batch] / found.processor_seconds[batch]
            pairs = zip(found.tokens[batch], base.tokens[batch], strict=True)
            same = sum(one == other for mine, theirs in pairs for one, other in zip(mine, theirs, strict=True))
            share = same / (batch * options.tokens)
            wanted = f", wanted {WANTED[batch]:g}" if name == "memopt" and batch in WANTED else ""
            print(
                f"{model} {dtype} batch {batch:2d} {name:12s} {num_tokens / found.seconds[batch]:9.1f} tokens/s"
                f"  {ratio:5.2f} x transformers ({processor_ratio:.2f} in processor time){wanted}; "
                f"{share:.0%} of tokens as transformers"
            )
    for name, found in figures.items():
        print(f"{model} {dtype} peak memory {name:12s} {found.peak_bytes / 2**20:8.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=("tiny", "wide"), default=["tiny", "wide"])
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", default=str(ROOT / ".venv-vllm" / "bin" / "python"))
    options = parser.parse_args()
    for model in options.models:
        with tempfile.TemporaryDirectory() as folder:
            release = make_release(model, Path(folder))
            for dtype in options.dtypes:
                figures, missing = compare(release, dtype, options)
                report(model, dtype, figures, options)
                for name, reason in missing.items():
                    print(f"{model} {dtype} {name} not run: {reason}")


if __name__ == "__main__":
    main()
