# Everything here needs Python 3.11 or newer and make; `make gpu-check` also a GPU and a torch that sees it.

PYTHON ?= python3
OUT ?= bench/results
ARGS ?=
PIP_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: help demo test test-all docs counts lint gpu-check clean

help:
	@echo "make demo       train a small GPT on two ranks, kill it, resume it, compare the bits"
	@echo "make test       lint, types and the tests, but for those marked slow"
	@echo "make test-all   lint, types and every test"
	@echo "make docs       write docs/kernels.md anew from the kernels' cases"
	@echo "make counts     compile all cases with a gate for what docs/kernels.md says of GPUs"
	@echo "make lint       lint and types only"
	@echo "make gpu-check  tests, sanitizers, speed, training and tuning on this machine's GPU, in 6 minutes"
	@echo "make clean      remove the virtual environment and all caches"

# Redone only when what it installs has changed. The link gives the checkout the name of the package it is, for mypy.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "sidestream needs Python 3.11 or newer: set PYTHON")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[test,dev]"
	mkdir -p $(VENV)/checkout
	ln -sfn ../.. $(VENV)/checkout/sidestream
	touch $@

demo: $(INSTALLED)
	$(BIN)/python -m sidestream.training.demo $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/$(if $(ARGS),pytest $(ARGS),python tests/side_by_side.py -m "not slow")

test-all: lint
	$(BIN)/python tests/side_by_side.py

docs: $(INSTALLED)
	$(BIN)/python -m sidestream.kernels.cases > docs/kernels.md

counts: $(INSTALLED)
	$(BIN)/python -m sidestream.kernels.ahead.counted
	$(MAKE) docs

gpu-check: export OUT := $(OUT)
gpu-check:
	$(PYTHON) bench/gpu_check.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
