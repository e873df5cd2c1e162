# `make` alone lists the targets.

PYTHON ?= python3
# Interpreter of test-gpu: one with a CUDA build of torch.
PY ?= python3
# Parallel GPU tests (test-gpu, needs pytest-xdist); empty: one at a time.
JOBS ?=
# Extra arguments for installing torch, e.g. the index of wheels for another CUDA version or for CPU only.
TORCH_ARGS ?=
# Extra arguments for pytest (test, test-slow, test-gpu) and for `quire` (demo, bench).
ARGS ?=

BIN := .venv/bin
STAMP := .venv/.stamp

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint type models mutations soak bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-16s %s\n", $$1, $$2 }'

setup: $(STAMP)  ## create .venv and install quire into it, editable, with pinned versions

# torch is installed first, on its own: any build that is present satisfies quire's dependency.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(TORCH_ARGS) torch -c constraints.txt
	$(BIN)/python -m pip install -e '.[test,dev,integrations]' -c constraints.txt
	mkdir -p .venv/src/quire  # the package layout as installed, for mypy: see [tool.mypy]
	ln -sfn $(addprefix $(CURDIR)/,$(wildcard quire/*) attn_ops passes graph_runner integrations) .venv/src/quire/
	@touch $@

demo: setup  ## generate text with the shipped model; no download, no GPU
	$(BIN)/quire generate --demo $(ARGS)

test: lint type  ## lint, type check, and run the tests that need no GPU and are not slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and not slow" -n 2 --dist worksteal $(ARGS)

test-slow: setup  ## run the slow tests: more models, compilers and dtypes, installs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not gpu and slow" -n 2 --dist worksteal $(ARGS)

# No .venv and no package index: quire is installed into the environment of PY, whose packages the tests use. Most GPU tests wait
# for compilers and the CPU, so JOBS=8 is faster.
test-gpu:  ## run the GPU tests with python3 (or PY=...) and its torch; JOBS=8 at a time
	$(PY) -m pip install -q --no-index --no-deps --no-build-isolation -e .
	$(PY) -m pytest -m "gpu and not alone" $(if $(JOBS),-n $(JOBS) --dist worksteal) $(ARGS) tests; \
	many=$$?; $(PY) -m pytest -m "gpu and alone" $(ARGS) tests; alone=$$?; \
	[ $$many = 5 ] || [ $$many = 0 ] && { [ $$alone = 5 ] || [ $$alone = 0 ]; } && [ $$many$$alone != 55 ]  # 5: no test chosen

lint: setup  ## ruff
	$(BIN)/ruff check .

type: setup  ## mypy
	$(BIN)/mypy

models: setup  ## serve every class of transformers, shrunk, and write docs/models.md (20 minutes; options in ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.zoo.all_models $(ARGS)

mutations: setup  ## break each rule of the proofs, and write the test that goes red (ARGS="--only row_rules")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.adversarial.mutations $(ARGS)

soak: setup  ## threads that use one engine and change its model, for 10 minutes (ARGS="--minutes 60")
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.graph_runner.soak $(ARGS)

bench: setup  ## run `quire bench` with the options in ARGS
	$(BIN)/quire bench $(ARGS)

clean:  ## remove build outputs and caches, except .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
