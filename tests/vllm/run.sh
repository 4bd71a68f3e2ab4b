#!/usr/bin/env bash
# `make test-vllm`: vLLM's CPU build serves BF16 exports of INT4 releases, and releases with calibrated scales of an FP8 KV
# cache; optional, a 3.5 GB environment of its own. Needs .venv (make test makes it), and AVX-512 for the FP8 cache.
# PASS or FAIL a model; exit code 1 if one fails. `tests/vllm/run.sh kv`: the KV scales alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-vllm
install="$venv/bin/python -m pip --disable-pip-version-check install --quiet"

if ! cmp -s tests/vllm/requirements.txt "$venv/.requirements"; then
  test -x "$venv/bin/python" || "${PYTHON:-python3}" -m venv "$venv"
  # Not on PyPI, where plain 2.13.0 is the CUDA build.
  $install torch==2.13.0+cpu || $install --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
  $install -r tests/vllm/requirements.txt
  # PyPI's builds of these want the CUDA torch and break `import transformers`; with Triton beside it vLLM 0.32's CPU
  # worker stops ("'_lib_fn_wrapper' object has no attribute 'get'"). Text models need none of them.
  $venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
  cp tests/vllm/requirements.txt "$venv/.requirements"
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
parts=${1:-exports kv}
status=0
run() { "$@" 2>"$work/log" || { status=1; tail -n 40 "$work/log" >&2; }; }

if [[ $parts == *exports* ]]; then
  .venv/bin/python tests/vllm/make_exports.py "$work/exports" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  for folder in "$work"/exports/*/; do
    run "$venv/bin/python" tests/vllm/serve_exports.py "$folder"
  done
fi
if [[ $parts == *kv* ]]; then
  .venv/bin/python tests/vllm/make_kv_releases.py "$work/kv" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
  for case in glm4_moe/release glm4_moe/wrong glm4_moe/export kimi_k2/release kimi_k2/export; do
    run "$venv/bin/python" tests/vllm/serve_kv_release.py "$work/kv/${case%/*}" "${case#*/}"
  done
fi
exit $status
