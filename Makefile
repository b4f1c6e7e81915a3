# Two commands do all set-up on a machine with Python 3.11 and nothing else: `make demo`, `make test`.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# torch writes a line to the terminal whenever its profiler starts or stops.
export KINETO_LOG_LEVEL := 6
export TORCH_CPP_LOG_LEVEL := ERROR

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint examples clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# Remade only when what it installs from changes; an interrupted install leaves no stamp.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(INSTALLED) ## train GPT-2 on real text, eager and under three caps; print the table
	$(BIN)/python examples/train_gpt.py

test: $(INSTALLED) ## run all tests but those marked slow
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist worksteal

test-all: $(INSTALLED) ## run all tests
	$(BIN)/python -m pytest

lint: $(INSTALLED) ## ruff check, ruff format, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

examples: $(INSTALLED) ## run every example, small
	$(BIN)/python examples/train_gpt.py --quick
	$(BIN)/python examples/train_resnet.py --quick
	$(BIN)/python examples/plan_llama.py --quick
	$(BIN)/python examples/peak_formula.py

clean: ## remove the environment and all caches
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
