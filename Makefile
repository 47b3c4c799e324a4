# `make demo` and `make test` need only Python 3.11+ and make; both build .venv themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
# Two workers: a laptop and CI have two cores or more, and torch runs one thread in each test.
# worksteal: a worker keeps the tests of a file together, so that each fixture is built once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test test-all test-faults fuzz lint format bench docs screenshot clean setup

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} is too old: acmoe needs 3.11 or newer; call make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/acmoe demo

test: $(READY)
	$(PYTEST) -m "not slow and not gpu and not faults"

test-all: $(READY)
	$(PYTEST) -m "not gpu"

# Fails and kills at every file operation of a command, damages every file of a run, and compares
# memory before and after 20,000 steps.
test-faults: $(READY)
	$(PYTEST) -m faults

# Random configs, files and requests for MINUTES, in WORKERS processes.
MINUTES ?= 5
WORKERS ?= 2
fuzz: $(READY)
	$(BIN)/python -m tests.faults.fuzz --minutes $(MINUTES) --workers $(WORKERS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/acmoe bench

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

# The picture in the README, from the demo's own report; needs Chromium.
screenshot: $(READY)
	$(BIN)/acmoe demo --out runs/demo
	$(BIN)/python tests/chromium.py runs/demo/report.html docs/images/report.png

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
