"""Coverage-guided fuzzing of every parser of outside bytes, with atheris: `python tests/fuzz/run.py --seconds 600`.

The seconds are shared among the parsers. Prints the runs of each; a crash gives exit code 1, its input in build/fuzz.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

_DICTIONARY = (
    *('"mediaType"', '"dsseEnvelope"', '"payload"', '"signatures"', '"sig"', '"subject"', '"predicate"', '"resources"'),
    *('"name"', '"digest"', '"sha256"', '"files"', '"path"', '"size_bytes"', '"ranks"', '"chunk_root"', '"keys"'),
    *('"dtype"', '"shape"', '"data_offsets"', '"weight_map"', '"__metadata__"', '"BF16"', '"F8_E4M3"', '"pem"'),
    *('"outputs"', '"cut"', '"folder"', '"owner"', '"rows"', '"columns"', '"expert"', '"tp2"', '"ep2"', '"file"'),
    *('"text"', '"kl"', '"low"', '"high"', '"value"', '"format"', '"memopt.quality/1"', '"error"', '"relative_mse"'),
    *('"tokens"', '"fallback"', '"layer"', '"role"', '"routed_expert"', '"I32"', '"I64"', "9.9e98", "1.234567e-03"),
    *("../", "1e400", "NaN", "9223372036854775808", "-1", "true", "null", "{}", "[]", '""', "0.5"),
)


def _fuzz(name: str, arguments: list[str]) -> None:
    """One parser, in this process: libFuzzer never returns."""
    import atheris

    with atheris.instrument_imports(include=["memopt"]):
        from fuzz.parsers import try_parser

    from fuzz.json_mutator import mutated_json

    def mutate(raw: bytes, max_size: int, seed: int) -> bytes:
        """Half of the time a JSON value, else bytes."""
        changed = mutated_json(raw, seed) if seed % 2 else None
        return changed if changed is not None and len(changed) <= max_size else atheris.Mutate(raw, max_size)

    def test_one(raw: bytes) -> None:
        try_parser(name, raw)

    atheris.Setup([sys.argv[0], *arguments], test_one, custom_mutator=mutate)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    # libFuzzer's dictionaries write a quotation mark as a byte.
    return word.replace('"', "\\x22")


def _run_one(name: str, seconds: int, seeds: tuple[bytes, ...]) -> tuple[int, int]:
    """(exit code, runs) of one parser in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        words = Path(folder, "words")
        words.write_text("".join(f'"{_escaped(word)}"\n' for word in _DICTIONARY))
        artifacts = Path("build/fuzz")
        artifacts.mkdir(parents=True, exist_ok=True)
        options = [
            f"-max_total_time={seconds}",
            f"-dict={words}",
            "-max_len=16384",
            "-timeout=10",
            "-rss_limit_mb=2048",
        ]
        options.append(f"-artifact_prefix={artifacts}/{name}-")
        done = subprocess.run(
            [sys.executable, __file__, "--parser", name, *options, str(corpus)],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        counts = re.findall(r"Done (\d+) runs", done.stderr)
        if done.returncode or not counts:
            print(done.stderr[-2000:], file=sys.stderr)
        return done.returncode or (not counts), int(counts[-1]) if counts else 0


def main() -> int:
    """Fuzz every parser in turn."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=int, default=600, help="in all (default 600)")
    options.add_argument("--parser", help=argparse.SUPPRESS)
    chosen, rest = options.parse_known_args()
    if chosen.parser:
        _fuzz(chosen.parser, rest)
        return 0
    from fuzz.parsers import PARSERS

    failed = 0
    total = 0
    for name, parser in PARSERS.items():
        code, runs = _run_one(name, max(chosen.seconds // len(PARSERS), 1), parser.seeds)
        total += runs
        failed |= code != 0
        print(f"{name:<10} {runs:>12,} runs  {'clean' if code == 0 else f'FAILED, exit code {code}'}", flush=True)
    print(f"{'all':<10} {total:>12,} runs")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
