PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NATIVE := $(wildcard loramux/kernels/cpu/*.cpp loramux/kernels/cpu/*.h)

.PHONY: setup demo test test-all check bench gpu-check
.DELETE_ON_ERROR:

setup: $(STAMP)  ## the environment, pinned dependencies and the native build; again only when one of them changed

$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -c 'import loramux.kernels.cpu._native' 2>/dev/null \
		|| echo 'Installed without the native kernels: is there a C++ compiler? `$(BIN)/pip install -v -e .` shows what failed.'
	@touch $@

demo: setup  ## the demo server, and a request to paste
	$(BIN)/loramux demo

test: setup  ## every test but the exhaustive sweeps
	$(BIN)/loramux demo --fetch-only
	$(BIN)/python -m pytest

test-all: setup  ## every test
	$(BIN)/loramux demo --fetch-only
	$(BIN)/python -m pytest -m 'slow or not slow'

check: setup  ## format, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: setup  ## throughput and latency over HTTP; appends to benchmarks/results.jsonl
	$(BIN)/loramux demo --fetch-only
	$(BIN)/python benchmarks/bench_serve.py

gpu-check: setup  ## every operation on the GPU against the CPU; says so where there is no GPU
	$(BIN)/python benchmarks/gpu_check.py
