# Everything a fresh clone needs. `make demo` and `make test` install first, if that has not been done.
#   make demo            install, then run the whole pipeline at a small size
#   make test            all tests;  make test-fast  the ones that take a few minutes together
#   make install         the environment .venv alone;  SET=gpu for a machine with CUDA
#   make lint            ruff and mypy
#   make lock            write requirements/*.txt from pyproject.toml;  make lock UPGRADE=--upgrade for newer versions
#   make clean           remove the environment and everything that can be made again (runs/ stays)

.DELETE_ON_ERROR:
.PHONY: demo test test-fast install lint lock clean
.DEFAULT_GOAL := install

SET ?= cpu
UPGRADE ?=
# Most tests wait for engines to start; each process needs up to 8 GB.
TEST_PROCESSES ?= 2
# The first of these that is Python 3.11 or 3.12.
PYTHON ?= $(shell for name in python3.11 python3.12 python3 python; do \
	$$name -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null \
	&& echo $$name && break; done)

BIN := .venv/bin
# Written last by scripts/install.py, so that half an installation is done anew.
INSTALLED := .venv/.installed-$(SET)

# The last line on standard output is the demo's JSON object: echo nothing after it.
demo: $(INSTALLED)
	@$(BIN)/slipstream pipeline recipes/demo.yaml --output_dir runs/demo-$$(date +%Y%m%d-%H%M%S) --json

# Files are divided among the processes whole, in their order, since the tests of a file share what they start.
test: $(INSTALLED)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

test-fast: $(INSTALLED)
	@$(BIN)/python -m pytest -m "not slow" -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements/$(SET).txt scripts/install.py
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 is found: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) scripts/install.py $(SET)

lint: $(INSTALLED)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

lock: $(INSTALLED)
	@$(BIN)/python scripts/lock.py $(UPGRADE)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
