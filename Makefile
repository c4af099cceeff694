# One command for each thing one wants. Each makes .venv first, with pip, and installs what is missing.
#
#   make check    parity check on the embedded target; ARGS="--model ..." for another
#   make test     the tests; ARGS="-k word" for some, ARGS="-m optin" for those with a package of their own
#   make lint     ruff, mypy (strict), import-linter
#   make wheel    sdist, and the wheel built from it, in dist/
#   make docs     the documentation, in site/; warnings are errors
#   make faults   every planted wiring fault against all probes; writes the matrix that ships
#   make peers    other trainers and readers, which tests/peers/ compares ours with

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PEERS := $(VENV)/.peers
MKDOCS := $(VENV)/.mkdocs
EXTRAS := dev,gguf,serve
ARGS ?=

# One thread a process: where cores are shared, two were ten times slower (DECISIONS.md).
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: check test lint wheel docs peers faults
.DELETE_ON_ERROR:

check: $(READY)
	$(BIN)/parity check $(ARGS)

# Some tests open the pages in a browser; where none can be installed they are skipped (never in CI).
test: $(READY)
	@bash tests/browser.sh
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

wheel: $(READY)
	$(BIN)/python -m build --no-isolation --outdir dist .

# Its packages are no part of `dev`: only this target and one test use them.
docs: $(MKDOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html"

$(MKDOCS): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt -e '.[docs]'
	touch $@

# The stamp is as old as the last successful installation; a change of either file installs again.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (the first time: about 3 GB, two minutes)"
	$(BIN)/python -m pip install --disable-pip-version-check -qq \
	    -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

# Every planted wiring fault against all probes; writes probes/matrix.json, which `parity probes --matrix` prints.
faults: $(PEERS)
	PARITY_PEERS=1 $(BIN)/python -m tests.faults.matrix $(ARGS)

peers: $(PEERS)

# Without dependencies: the peers' pins contradict ours (constraints-peers.txt). Nothing that is there changes.
$(PEERS): constraints-peers.txt | $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check -qq --no-deps -r constraints-peers.txt
	touch $@
