# Every target sets up what it needs first and skips what is there. ENGINE=cpu|cuda, VARIANT=name of a file in params/.

ENGINE ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
ENGINE := $(ENGINE)
VARIANT ?= smollm2-135m-$(ENGINE)
BIN := .venv/bin
SETUP = python=$$(sh setup/python.sh) && "$$python" setup/bootstrap.py --engine "$(ENGINE)"
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

.DEFAULT_GOAL := help
.PHONY: help report test check test-all bench verdicts lab rehearse setup setup-test lock clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1 \2/p' Makefile | awk '{printf "  %s %-10s", $$1, $$2; $$1 = $$2 = ""; print}'

report: setup  ## measure the variant with every notebook, write one HTML report
	@$(BIN)/perfbook run "params/$(VARIANT).yaml"

test: setup-test  ## lint, types and all tests that take seconds to minutes
	@$(LINT)
	@$(BIN)/pytest --hypothesis-profile ci -m "not long"

check: setup-test  ## lint, types and unit tests: no server, no browser
	@$(LINT)
	@$(BIN)/pytest --hypothesis-profile ci -m "not server and not browser and not long"

test-all: setup-test  ## everything, the long tests too
	@$(LINT)
	@$(BIN)/pytest

bench: setup-test  ## perfbook against its peers
	@for each in bench/*.py; do $(BIN)/python -m "bench.$$(basename "$$each" .py)" || exit 1; done

verdicts: setup  ## the CPU variant's settings with enough launches for verdicts (about 15 minutes)
	@$(BIN)/perfbook run params/smollm2-135m-cpu.yaml --only 01,02,05 --set tuning.launches=8 --set tuning.requests_per_stream=4 \
	    --set 'tuning.concurrency=[1, 8]' --set tuning.settings.cache-2-gib.env.VLLM_CPU_KVCACHE_SPACE=2

lab: setup  ## JupyterLab on the notebooks, for this machine only
	@$(BIN)/jupyter lab --ip=127.0.0.1 notebooks

rehearse: setup  ## the same notebooks against a stand-in server: make rehearse VARIANT=…
	@$(BIN)/perfbook run "params/$(VARIANT).yaml" --rehearse

setup:  ## only set up: .venv and the embedded model
	@$(SETUP)

setup-test:
	@$(SETUP) --tests

lock: setup  ## resolve the lock files again (minutes, gigabytes)
	@$(BIN)/python setup/lock.py

clean:  ## remove the environment and the caches; outputs/ stays
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis lib/*.egg-info
	find lib tests bench setup -name __pycache__ -type d -prune -exec rm -rf {} +
