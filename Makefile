# `make` alone lists the targets.

PYTHON ?= python3
# The interpreter of test-gpu: whichever one has a CUDA build of torch.
PY ?= python3
# GPU tests at a time (test-gpu); empty: one after the other, without pytest-xdist.
JOBS ?=
# More arguments for installing torch, e.g. the index of the wheels for another CUDA version or for CPU only.
TORCH_ARGS ?=
# More arguments for pytest (test, test-slow, test-gpu) and for `quire` (demo, bench).
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint type bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## create .venv and install quire into it, with the pinned tools for tests

# torch goes first, on its own: a torch that is installed satisfies quire's dependency, whichever build it is.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH_ARGS) torch -c constraints.txt
	$(BIN)/python -m pip install -e '.[test,dev]' -c constraints.txt
	mkdir -p .venv/src/quire  # the package as it is installed, for mypy: see [tool.mypy]
	ln -sfn $(addprefix $(CURDIR)/,$(wildcard quire/*) attn_ops passes graph_runner) .venv/src/quire/
	@touch $@

demo: setup  ## generate text with the model that ships with quire; no download, no GPU
	$(BIN)/quire generate --demo $(ARGS)

test: lint type  ## lint, type check and run the tests that need no GPU, but not the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist worksteal $(ARGS)

test-slow: setup  ## run the slow ones: more models, compilers and dtypes of what the others test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and slow" -n 2 --dist worksteal $(ARGS)

# Most GPU tests wait for compilers and for the CPU: JOBS=8 runs as many at once (needs pytest-xdist).
test-gpu:  ## run the GPU tests with the python3 in use (or PY=...) and its own torch; no .venv; JOBS=8 at a time
	$(PY) -m pytest -m "gpu and not alone" $(if $(JOBS),-n $(JOBS) --dist worksteal) $(ARGS) tests; \
	many=$$?; $(PY) -m pytest -m "gpu and alone" $(ARGS) tests; alone=$$?; \
	[ $$many = 5 ] || [ $$many = 0 ] && { [ $$alone = 5 ] || [ $$alone = 0 ]; } && [ $$many$$alone != 55 ]  # 5: no test chosen

lint: setup  ## ruff
	$(BIN)/ruff check .

type: setup  ## mypy
	$(BIN)/mypy

bench: setup  ## run the benchmark of `quire bench`; pass options in ARGS
	$(BIN)/quire bench $(ARGS)

clean:  ## remove build outputs and caches, and keep .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
