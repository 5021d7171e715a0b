# Every target sets up what it needs and is safe to run again.
PYTHON ?= python3
BIN := .venv/bin
SHELL := /bin/bash
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: env sglang run lint test test-all clean

env: .venv/.ready

.venv/.ready: setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "Python 3.11 or 3.12 is needed; set PYTHON=python3.11")'
	@echo "Setting up .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev,assets]'
	touch $@

# The real SGLang server has an environment of its own: it pins other versions of many packages.
sglang: env
	bash hybridflow/rollout/sglang_cpu/install.sh .venv-sglang

run: env
	$(BIN)/hybridflow make quickstart
	$(BIN)/hybridflow train recipes/quickstart.yaml

lint: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

test: sglang lint
	HYBRIDFLOW_REQUIRE_SGLANG=1 $(BIN)/python -m pytest

test-all: sglang lint
	HYBRIDFLOW_REQUIRE_SGLANG=1 $(BIN)/python -m pytest -m 'not gpu' --timeout 1800

clean:
	rm -rf .venv .venv-sglang build *.egg-info
