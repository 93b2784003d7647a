# servelite: `make demo` serves a real model, `make test` runs the tests. `make help` lists the rest.

PORT ?= 8000
PYTHON ?= python3
# Asked only where the configured package index has no CPU build of torch.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

TORCH := 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# compat: a folder that is called servelite, a clone beside a script of one's own, is not taken for it.
EDITABLE := --config-settings editable_mode=compat -e
# Two runs side by side; it takes what pytest takes.
PYTEST := $(BIN)/python -m tests.two_runs
# What installing compiles.
NATIVE := $(wildcard csrc/cpu/*)

.DEFAULT_GOAL := help
.PHONY: help demo install test test-slow test-all lint format docs clean

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

define CURL
Once it serves, paste this into another terminal:

  curl http://127.0.0.1:$(PORT)/v1/chat/completions -H 'Content-Type: application/json' -d '{
    "model": "demo", "temperature": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}]}'

endef
export CURL

# The recipe's last command takes the shell's place: Ctrl-C reaches servelite itself.
demo: $(VENV)/.run ## serve the demo model on 127.0.0.1 (PORT=8000)
	@$(BIN)/python -m servelite.loader.demo > /dev/null
	@echo "$$CURL"
	@exec $(BIN)/servelite serve demo --host 127.0.0.1 --port $(PORT)

install: $(VENV)/.run ## create .venv and install servelite into it

test: lint ## format, lint and type check, then all tests but the slow ones
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/.dev ## the slow tests only
	$(PYTEST) -m slow --durations=10

test-all: lint ## every test; a skip that tests/allowed_skips.txt does not list fails
	SERVELITE_TEST_ALL=1 $(PYTEST) --durations=20

lint: $(VENV)/.dev ## format check, lint, types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/.dev ## format and mend what the linter can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(VENV)/.dev ## write the pages of docs that are tables of what the code declares
	$(BIN)/python docs/write_tables.py

clean: ## remove .venv, build results and tool caches
	rm -f servelite/kernels/cpu/*.so
	rm -rf $(VENV) build dist *.egg-info tests/node/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "servelite needs Python 3.11 or newer and $(PYTHON) is not: say make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch comes first and by its exact version: left to the dependency range, pip would take a CUDA
# build of several gigabytes.
$(VENV)/.torch: $(VENV)/.created
	@if command -v nvidia-smi > /dev/null 2>&1; then \
	  echo "installing torch $(TORCH)"; $(PIP) install torch==$(TORCH); \
	else \
	  echo "installing torch $(TORCH), the CPU build"; \
	  $(PIP) install torch==$(TORCH)+cpu 2> $(VENV)/torch.log || \
	  { echo "not on the package index; trying $(TORCH_INDEX)"; \
	    $(PIP) install --extra-index-url $(TORCH_INDEX) torch==$(TORCH)+cpu; }; \
	fi
	@touch $@

$(VENV)/.run: $(VENV)/.torch pyproject.toml $(NATIVE)
	@echo "installing servelite"
	@$(PIP) install $(EDITABLE) .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml $(NATIVE)
	@echo "installing servelite and what its tests need"
	@$(PIP) install $(EDITABLE) '.[dev]'
	@touch $@ $(VENV)/.run
