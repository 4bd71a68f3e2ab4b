# `make demo` and `make test` need Python 3.11+ and git only: each makes .venv if it is absent.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

DEMO_SOURCE := examples/tiny-glm5-fp8
DEMO_OUTPUT := demo-output/tiny-glm5-int4

# `make bench` needs about 14 GiB in BENCH_FOLDER (the temporary folder unless it is set) for its 8 GiB checkpoint.
BENCH_GIB ?= 1
BENCH_RUNS ?= 3
BENCH_WORKERS ?= 1 2
BENCH_MEMORY_GIB ?= 1 8
BENCH_FOLDER ?=
BENCH_PLACE = $(if $(BENCH_FOLDER),--folder $(BENCH_FOLDER))

# One thread a test process: two processes with two threads each are slower than with one.
OMP_NUM_THREADS_IN_TESTS ?= 1

.PHONY: demo test test-all lint types bench bench-speed bench-memory bench-search bench-quality bench-verify bench-int4-cpu bench-integrity bench-decode bench-kv-quality bench-quality-lm bench-probes bench-gpu gate fuzz test-tasks test-vllm clean

$(VENV)/.runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(PIP) -e '.[test,lint]'
	touch $@

demo: $(VENV)/.runtime
	rm -rf demo-output
	$(BIN)/memopt inspect $(DEMO_SOURCE)
	@echo
	$(BIN)/memopt plan $(DEMO_SOURCE) --recipe glm-5.2-int4
	@echo
	$(BIN)/memopt compress $(DEMO_SOURCE) $(DEMO_OUTPUT) --recipe glm-5.2-int4
	@echo
	$(BIN)/memopt keygen demo-output/release.pem --no-passphrase
	$(BIN)/memopt sign $(DEMO_OUTPUT) --key demo-output/release.pem
	@echo
	$(BIN)/memopt verify $(DEMO_OUTPUT) --key demo-output/release.pub
	@echo
	@echo "One bit of a copy is flipped; verify must refuse it with exit code 4:"
	cp -r $(DEMO_OUTPUT) demo-output/tampered
	$(BIN)/python examples/flip_one_bit.py demo-output/tampered/model-00001-of-00001.safetensors 9000000
	$(BIN)/memopt verify demo-output/tampered --key demo-output/release.pub; test $$? -eq 4
	@echo
	@echo "The same release with files for 8 tensor-parallel ranks beside it, read from the signed one:"
	$(BIN)/memopt shard $(DEMO_OUTPUT) demo-output/tiny-glm5-int4-tp8 --tp 8 --verify-key demo-output/release.pub
	@echo
	@echo "The same experts solved by GPTQ on 32 x 128 tokens of Python, and what both cost on code that calibration never saw:"
	$(BIN)/python examples/python_text.py asyncio email json > demo-output/calibration.jsonl
	$(BIN)/python examples/python_text.py unittest > demo-output/held-out.jsonl
	$(BIN)/memopt compress $(DEMO_SOURCE) $(DEMO_OUTPUT)-gptq --recipe glm-5.2-int4-gptq --calibration demo-output/calibration.jsonl --samples 32 --seq-len 128
	$(BIN)/memopt evaluate $(DEMO_SOURCE) $(DEMO_OUTPUT) --data demo-output/held-out.jsonl --window 128 --max-windows 16 --no-write
	$(BIN)/memopt evaluate $(DEMO_SOURCE) $(DEMO_OUTPUT)-gptq --data demo-output/held-out.jsonl --window 128 --max-windows 16
	$(BIN)/memopt sign $(DEMO_OUTPUT)-gptq --key demo-output/release.pem
	@echo
	@echo "Text from the signed release, every byte of it verified first (a model of 13 MB, trained on Python for an hour):"
	$(BIN)/memopt generate $(DEMO_OUTPUT) --verify-key demo-output/release.pub --prompt "def " --max-tokens 64
	@echo
	@echo "Made $(DEMO_OUTPUT), signed. Next: $(BIN)/memopt dequantize $(DEMO_OUTPUT) demo-output/tiny-glm5-bf16"

test: $(VENV)/.test
	OMP_NUM_THREADS=$(OMP_NUM_THREADS_IN_TESTS) $(BIN)/python -m pytest

test-all: $(VENV)/.test
	OMP_NUM_THREADS=$(OMP_NUM_THREADS_IN_TESTS) $(BIN)/python -m pytest -m 'not gate'

# Ahead-of-time compiles of every kernel at production shapes, held to tests/kernels/compiled/budgets. No GPU needed.
gate: $(VENV)/.test
	$(BIN)/python -m pytest -m gate tests/kernels/compiled

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# mypy follows the folders as they are installed, not as they stand: an installed copy is checked.
types: $(VENV)/.test
	rm -rf build/typed build/lib
	$(PIP) --no-deps --target build/typed .
	cd build/typed && MYPYPATH=. $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p memopt

# Everything that docs/benchmarks.md tells of, but perplexity (bench-quality), in one run: speed, memory, scale search.
bench: $(VENV)/.test
	@$(MAKE) --no-print-directory bench-speed
	@$(MAKE) --no-print-directory bench-memory
	@$(MAKE) --no-print-directory bench-search
	@echo "perplexity and KL on text that the model never saw: make bench-quality"

bench-speed: $(VENV)/.test
	$(BIN)/python benchmarks/compress.py --gib $(BENCH_GIB) --runs $(BENCH_RUNS) --workers $(BENCH_WORKERS) $(BENCH_PLACE)

bench-memory: $(VENV)/.test
	$(BIN)/python benchmarks/memory.py --gib $(BENCH_MEMORY_GIB) --many $(BENCH_PLACE)

bench-search: $(VENV)/.test
	$(BIN)/python benchmarks/scale_search.py

bench-quality: $(VENV)/.test
	$(BIN)/python benchmarks/perplexity.py

# The verifier and the loader, against sha256sum, hashlib and verify-then-load_file.
bench-verify: $(VENV)/.test
	$(BIN)/python benchmarks/verify.py
	$(BIN)/python benchmarks/load.py

# INT4 products on the CPU against torch's float32 and BF16 ones.
bench-int4-cpu: $(VENV)/.test
	$(BIN)/python -m benchmarks.int4_gemm_cpu

# What page tags cost a step: tagged against noop, paired blocks, a bootstrap interval.
bench-integrity: $(VENV)/.test
	$(BIN)/python benchmarks/page_tags_overhead.py

# Tokens a second and peak memory against transformers on the dequantized weights, and vLLM where it is installed.
bench-decode: $(VENV)/.test
	$(BIN)/python benchmarks/decode_cpu.py

# What an FP8 KV cache costs, one shot and over turns; writes the tables of docs/kv-quality.md.
bench-kv-quality: $(VENV)/.test
	$(BIN)/python -m benchmarks.kv_quality.main --write docs/kv-quality.md

# Quality of INT4 by method on real language models (three packages of PyPI; keeps everything in build/quality).
bench-quality-lm: $(VENV)/.test
	$(BIN)/python -m benchmarks.smollm2.quality build/quality

# What samples, sweeps, damping, feedback and mixed groups bring to GPTQ: about two minutes of a core a probe.
bench-probes: $(VENV)/.test
	$(BIN)/python -m benchmarks.smollm2.probes build/quality

# Correctness and speed of every kernel on the GPU that is at hand: under 5 minutes on one H200, no network.
bench-gpu: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu.main

# Coverage-guided fuzzing of every parser of outside bytes (atheris).
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.test
	$(PIP) -e '.[fuzz]'
	$(BIN)/python tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

# lm-eval for real, on local tasks and servers of memopt's own engine; no network beyond pip.
test-tasks: $(VENV)/.test
	$(PIP) -e '.[tasks]'
	OMP_NUM_THREADS=$(OMP_NUM_THREADS_IN_TESTS) $(BIN)/python -m pytest -n 0 -m slow tests/compressor/evaluate/test_lm_eval.py

# Optional: vLLM's CPU build, in a virtual environment of its own (gigabytes).
test-vllm: $(VENV)/.test
	bash tests/vllm/run.sh

clean:
	rm -rf $(VENV) .venv-vllm build *.egg-info demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
