# The newest supported Python that is here: on the PATH, or one of pyenv's.
PYTHON ?= $(shell for p in python3.12 "$$HOME"/.pyenv/versions/3.12*/bin/python python3.11 \
	"$$HOME"/.pyenv/versions/3.11*/bin/python python3; do \
	"$$p" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := .[dev,tpu]
TUNIX := .venv-tunix
TUNIX_TESTS := 'pytest>=8' pytest-xdist hypothesis
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
GREEN = "$(PYTHON)" scripts/record_green.py# what was last green, and on which commit
export JAX_PLATFORMS ?= cpu
unexport PYTHONDONTWRITEBYTECODE # uv leaves compiling modules to their first import, whose result has to be kept

.PHONY: install demo test quick test-slow mutants conformance conformance-quick lint style types tests core site dist matrix test-tunix clean

install: $(STAMP)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "logitless needs Python 3.11 or later: make PYTHON=/path/to/python $(MAKECMDGOALS)"; exit 2; }
	"$(PYTHON)" scripts/install.py $(VENV) -e '$(EXTRAS)'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/logitless demo

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

lint: style types

tests: $(STAMP)
	$(PYTEST) -m 'not slow and not gpu'

core: $(STAMP)
	$(PYTEST) -m 'quick and not slow'

# Style first, for it takes a second; then types beside the tests.
test: style
	@$(MAKE) --no-print-directory -j2 tests types

quick: style
	@$(MAKE) --no-print-directory -j2 core types

test-slow: $(STAMP)
	$(PYTEST) -m slow --junitxml=$(VENV)/test-slow.xml
	$(GREEN) test-slow $(VENV)/test-slow.xml

# Tunix brings about a hundred packages, so it has an environment of its own. Its losses are compiled by the dozen,
# and run on one core each.
$(TUNIX)/.installed: pyproject.toml
	"$(PYTHON)" scripts/install.py $(TUNIX) -e '.[tunix]' $(TUNIX_TESTS)
	touch $@

test-tunix: $(TUNIX)/.installed
	$(TUNIX)/bin/python -m pytest -n 2 --dist worksteal --junitxml=$(TUNIX)/report.xml \
		tests/integrations tests/objectives/test_frameworks.py
	$(GREEN) test-tunix $(TUNIX)/report.xml

mutants: $(STAMP)  # 200 small faults drawn at random, one at a time, and the tests that execute their lines
	$(BIN)/python scripts/mutation

# Their code and ours on the same batches, with the peers in a folder of their own. Liger and veRL come without what they
# ask for (Triton, vLLM, older transformers): the losses need none of it. PyTorch 2.13.0, so that a build that is here is
# taken and no newest one with CUDA.
CONFORMANCE := .venv-conformance
CONFORMANCE_PYTHON ?= $(shell command -v python3.11 || echo python3)
$(CONFORMANCE)/.installed: pyproject.toml
	"$(CONFORMANCE_PYTHON)" -m venv --clear $(CONFORMANCE)
	$(CONFORMANCE)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(CONFORMANCE)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[conformance]'
	$(CONFORMANCE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps liger-kernel==0.8.5 verl==0.9.1
	touch $@

conformance: $(CONFORMANCE)/.installed
	$(CONFORMANCE)/bin/python tests/conformance benchmarks/results/conformance.json docs/conformance.md \
		--junitxml=$(CONFORMANCE)/report.xml
	$(GREEN) conformance $(CONFORMANCE)/report.xml

# TRL's loss and from_trl alone: a minute on two quiet cores. Nothing is recorded.
conformance-quick: $(CONFORMANCE)/.installed
	$(CONFORMANCE)/bin/python -m pytest -q -p no:cacheprovider -W ignore tests/conformance/test_trl.py

site: $(STAMP)  # the pages as a website, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo site/index.html

dist: $(STAMP)  # wheel and sdist in dist/, each tried in an empty environment
	$(BIN)/python scripts/dist.py
	$(GREEN) dist

matrix:  # the suite on jax 0.10, 0.11 and 0.12; environments in .matrix/, result in benchmarks/results/matrix.json
	"$(PYTHON)" scripts/matrix.py
	$(GREEN) matrix

clean:
	rm -rf $(VENV) $(TUNIX) $(CONFORMANCE) .matrix site dist .pytest_cache .mypy_cache .ruff_cache .jax_cache .mutation
