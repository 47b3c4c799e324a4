# `make demo` and `make test` need only Python 3.11+ and make; both build .venv themselves.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
# Two workers: a laptop and CI have two cores or more, and torch runs one thread in each test.
# worksteal: a worker keeps the tests of a file together, so that each fixture is built once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
# Tests start Python in dozens of processes, which would each compile the package.
unexport PYTHONDONTWRITEBYTECODE

# Routers, configs, files, the commands, short training runs: what a version of another package may
# break. `make test-floors` and `make test-newest` run it.
VERSION_TESTS := tests/test_floors.py tests/config tests/storage tests/routing tests/examples \
  tests/cli/test_commands.py tests/train/test_resume.py tests/test_golden_run.py \
  tests/test_plain_model.py tests/models/test_decoder.py tests/models/test_decoder_context.py \
  tests/ops/test_cross_entropy.py tests/analyze/test_figure_files.py
QUICK := -m "not slow and not gpu and not faults"
INSTALL := -m pip install --quiet --disable-pip-version-check
EVERYTHING := -e '.[dev,hf,vision,data]'
FLOORS := build/venv-floors
NEWEST := build/venv-newest
DIST := build/venv-dist

.PHONY: demo test test-all test-gpu test-faults test-floors test-newest test-extras fuzz lint audit \
  format bench docs dist release golden screenshot clean setup

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python {v[0]}.{v[1]} is too old: acmoe needs 3.11 or newer; call make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)
	$(BIN)/acmoe demo

test: $(READY)
	$(PYTEST) $(QUICK) --hypothesis-profile=quick

test-all: $(READY)
	$(PYTEST) -m "not gpu"

# Every test that needs a CUDA device; without one it says so and fails. In another Python:
# python tools/test_gpu.py
test-gpu: $(READY)
	$(BIN)/python tools/test_gpu.py

# Fails and kills at every file operation of a command, damages every file of a run, and compares
# memory before and after 20,000 steps.
test-faults: $(READY)
	$(PYTEST) -m faults

# With exactly the oldest versions that pyproject.toml allows. They are old: what they would not do
# again (DeprecationWarning) is no failure.
test-floors: $(FLOORS)/.ready
	$(FLOORS)/bin/python -m pytest -n 2 --dist worksteal $(QUICK) -W ignore::DeprecationWarning $(VERSION_TESTS)

$(FLOORS)/.ready: pyproject.toml constraints-floors.txt
	$(PYTHON) -m venv --clear $(FLOORS)
	$(FLOORS)/bin/python $(INSTALL) -c constraints-floors.txt $(EVERYTHING)
	@touch $@

# With the newest versions that the registry has today.
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --upgrade $(EVERYTHING)
	$(NEWEST)/bin/python -m pytest -n 2 --dist worksteal $(QUICK) $(VERSION_TESTS)

# The wheel with each extra, one after the other, in an environment that has no other extra.
EXTRAS ?=
test-extras: dist
	$(BIN)/python tools/extras.py $(EXTRAS)

# Random configs, files and requests for MINUTES, in WORKERS processes.
MINUTES ?= 5
WORKERS ?= 2
fuzz: $(READY)
	$(BIN)/python -m tests.faults.fuzz --minutes $(MINUTES) --workers $(WORKERS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The licence of every installed package (build/licences.md), and its known vulnerabilities.
audit: $(READY)
	$(BIN)/python tools/licences.py
	$(BIN)/python tools/audit.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/acmoe bench

# All pages, with the generated reference, into site/; a warning or a dead link is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python tools/build_docs.py

# The wheel and the sdist in dist/: built, checked, installed and tried. The wheel is built from the
# sdist. Tools of packaging have an environment of their own: nothing else needs them.
dist: $(READY) $(DIST)/.ready
	rm -rf dist
	$(DIST)/bin/python -m build --no-isolation --outdir dist
	$(DIST)/bin/python -m twine check --strict dist/*
	$(BIN)/python tools/archives.py

$(DIST)/.ready: pyproject.toml
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST)/bin/python $(INSTALL) 'build>=1.2' 'hatchling>=1.27' 'twine>=6.1'
	@touch $@

# Sets the version, dates its section of CHANGELOG.md, commits and tags; pushes nothing.
release: $(READY)
	$(BIN)/python tools/release.py $(VERSION)

# The runs of the released version that is checked out, for tests/test_golden_run.py.
golden: $(READY)
	$(BIN)/python tools/make_golden.py

# The picture of the report, from the demo's own report; needs Chromium.
screenshot: $(READY)
	$(BIN)/acmoe demo --out runs/demo
	$(BIN)/python tests/chromium.py runs/demo/report.html docs/images/report.png

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
