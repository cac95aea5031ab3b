PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export JAX_PLATFORMS ?= cpu

.PHONY: install demo test test-slow mutants lint docs clean

install: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,tpu]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/logitless demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n 2 -m 'not slow and not gpu'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m slow || [ $$? -eq 5 ]  # 5: there are none yet

mutants: $(STAMP)  # faults planted one at a time, and the tests that must see them
	$(BIN)/python tests/mutants

docs: $(STAMP)
	$(BIN)/python -m logitless.docs docs/api.md

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
