# Everything a developer or CI runs. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install test test-oldest test-gpu test-real lint format quickstart clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := constraints/dev.txt

# The oldest supported transformers lies in a folder of its own, which goes first on the path: a second environment would hold
# a second copy of torch.
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := 5.20.0

# The environment is made anew when the interpreter, the pins or the metadata have changed.
HASH := $(shell { $(PYTHON) --version; cat pyproject.toml $(CONSTRAINTS) Makefile; } 2>&1 | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed-$(HASH)
INSTALLED_OLDEST := $(OLDEST)/.installed-$(OLDEST_TRANSFORMERS)-$(HASH)

# One test process per core, each with one thread; more than eight spend their time on importing torch.
JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores : 8)))
PYTEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest
PARALLEL := -n $(JOBS) --dist worksteal

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

install: $(INSTALLED) ## the development environment, in .venv

test: lint $(INSTALLED_OLDEST) ## lint, types and every test that needs neither a GPU nor real weights
	$(PYTEST) -m "not gpu and not real" $(PARALLEL)
	$(MAKE) --no-print-directory test-oldest

test-oldest: $(INSTALLED_OLDEST) ## the model and conversion tests under the oldest supported transformers
	@echo "transformers $(OLDEST_TRANSFORMERS), the oldest supported version:"
	LIGER_TEST_CASES=main PYTHONPATH=$(OLDEST) $(PYTEST) tests/models tests/conversions -m "not gpu and not real" $(PARALLEL)

test-gpu: ## the tests that need a GPU, with $PYTHON's own packages
	$(PYTHON) -m pytest -m gpu

test-real: $(INSTALLED) ## the tests on real weights, which are downloaded once into .cache
	$(PYTEST) -m real

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff rewrite the sources
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quickstart: $(INSTALLED) ## load, check, train and export a real model, in under four minutes on two cores
	$(BIN)/python examples/quickstart.py $(ARGUMENTS)

clean: ## remove the environments and every cache except downloaded weights
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: an open range in a larger resolution can fetch several builds of it. A CUDA build brings the
# Triton that it was built with, a CPU build none; the pin is for the latter.
$(INSTALLED):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11, which the pinned transformers needs: make PYTHON=python3.11 ..." >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' $(CONSTRAINTS))" -c $(CONSTRAINTS)
	if $(BIN)/python -c 'import triton' 2>/dev/null; then sed '/^triton==/d' $(CONSTRAINTS); else cat $(CONSTRAINTS); fi > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet "$$(grep '^setuptools==' $(CONSTRAINTS))"
	$(BIN)/pip install --quiet --no-build-isolation -e '.[dev]' -c $(VENV)/constraints.txt
	touch $@

$(INSTALLED_OLDEST): $(INSTALLED)
	rm -rf $(OLDEST)
	$(BIN)/pip install --quiet --no-deps --target $(OLDEST) transformers==$(OLDEST_TRANSFORMERS)
	PYTHONPATH=$(OLDEST) $(BIN)/python -c 'import transformers; assert transformers.__version__ == "$(OLDEST_TRANSFORMERS)"'
	touch $@
