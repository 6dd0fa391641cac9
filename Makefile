# Jitney. `make demo` and `make test` work on a fresh clone: Linux, Python 3.11, make; a C compiler makes it fast.

SHELL  := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
RUNS   := $(VENV)/.installed
TESTS  := $(VENV)/.installed-dev
PROTOS := $(shell find protos -name '*.proto')
say = @printf '\033[1m==> %s\033[0m\n' "$(1)"
# Quiet, but on a terminal the name of what is being fetched, on one line.
pip = @if [ -t 1 ]; then \
	$(BIN)/python -m pip --disable-pip-version-check --no-input $(1) 2>&1 \
	  | awk '/^ *(ERROR|error)/ {print; next} /Collecting|Downloading|Building/ {printf "\r\033[K    %.70s", $$0; fflush()} END {printf "\r\033[K"}'; \
	else $(BIN)/python -m pip --disable-pip-version-check --no-input -qq $(1); fi

.DEFAULT_GOAL := help
.PHONY: help venv protos kernels model serve demo test test-slow lint types proto-check fmt bench-quality bench-batching bench-step bench-decide bench-ledger bench-static bench-exercises bench-preempt bench-lengths bench-prefix bench-tiers bench-kernels bench-peers bench-gpu k8s wheel clean distclean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):[^#]*## /\1\t/' | expand -t 18

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "Jitney needs Python 3.11: $(PYTHON) was not found (make PYTHON=/path/to/python3.11)"; exit 1; }
	$(call say,creating $(VENV))
	@$(PYTHON) -m venv $(VENV)

$(RUNS): pyproject.toml setup.py $(PROTOS) | $(VENV)/bin/python
	$(call say,installing what Jitney needs into $(VENV): some 240 MB the first time; much more with PyTorch for CUDA)
	$(call pip,install -e .)
	@touch $@

$(TESTS): $(RUNS)
	$(call say,installing what its tests need: some 170 MB the first time)
	$(call pip,install -e '.[dev]')
	@touch $@

venv: $(TESTS) ## the virtual environment with everything in it

protos: $(TESTS) ## generate the gRPC stubs from protos/
	@$(BIN)/python -m jitney.build_stubs

kernels: $(RUNS) ## compile the C kernels, where a compiler is found
	@$(BIN)/python -m executor_svc.kernels.build

model: $(RUNS) ## fetch the default model (once, 93 MB)
	@$(BIN)/jitney model fetch

serve: kernels model ## run the three services here until Ctrl-C
	@$(BIN)/jitney serve

demo: kernels model ## start the services, send thirty requests at once, show what happens
	$(call say,demo)
	@$(BIN)/jitney demo

test: protos kernels model lint ## everything set up, linted and tested
	$(call say,tests)
	@$(BIN)/python -m pytest -q -m 'not slow'

test-slow: protos kernels model ## the tests that take longer
	@$(BIN)/python -m pytest -q -m slow

lint: types proto-check ## ruff, mypy, buf
	$(call say,ruff)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "not formatted: run make fmt"; exit 1; }

types: protos ## mypy --strict over the tree
	$(call say,mypy)
	@$(BIN)/mypy --no-error-summary

proto-check: protos ## buf: lint, and no breaking change against the last release
	$(call say,buf)
	@$(BIN)/buf lint
	@tag=$$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null || true); \
	if [ -n "$$tag" ]; then $(BIN)/buf breaking --against ".git#tag=$$tag"; else echo "no release yet: nothing to break"; fi

fmt: $(TESTS) ## format the code
	@$(BIN)/ruff check --quiet --fix . || true
	@$(BIN)/ruff format --quiet .
	@$(BIN)/buf format -w

bench-quality: kernels model ## what lighter weights cost: perplexity and agreement with fp32
	@$(BIN)/python -m bench.quality $(ARGS)

bench-batching: kernels model ## tokens/s and step time at batch 1 to 128
	@$(BIN)/python -m bench.batching $(ARGS)

bench-step: kernels protos model ## where a decode step's time goes, and what the whole stack costs over the bare forward pass
	@$(BIN)/python -m bench.step $(ARGS)

bench-decide: protos ## the control path of a step, beside vLLM's in-process scheduler
	@$(BIN)/python -m bench.decide $(ARGS)

bench-ledger: protos ## block accounting of a step and a long prompt's look-up, beside vLLM's KVCacheManager
	@$(BIN)/python -m bench.ledger $(ARGS)

bench-static: kernels model ## continuous batching beside static batches; horizons; chunked prefill
	@$(BIN)/python -m bench.static $(ARGS)

bench-lengths: protos ## how well the lengths of answers are predicted
	@$(BIN)/python -m bench.lengths $(ARGS)

bench-preempt: protos ## time lost to preemption: by the rule, by recomputing always, by swapping always
	@$(BIN)/python -m bench.preempt $(ARGS)

bench-exercises: protos ## the worked examples of the textbook, computed
	@$(BIN)/python -m bench.exercises $(ARGS)

bench-prefix: kernels protos model ## first token after a hit in each tier; eviction orders on public traces (ARGS="--conversation FILE ...")
	@$(BIN)/python -m bench.prefix $(ARGS)

bench-kernels: $(TESTS) ## registers, spills and loads of the CUDA kernels; whether their tests see mistakes
	@$(BIN)/python -m bench.kernels $(ARGS)

bench-tiers: kernels protos ## copies between device pool, CPU tier and SSD, beside memcpy and a plain file
	@$(BIN)/python -m bench.tiers $(ARGS)

bench-peers: protos kernels model ## beside llama.cpp, transformers and vLLM's CPU build, which it sets up (ARGS="--quick")
	@$(BIN)/python -m bench.peers $(ARGS)

bench-gpu: kernels protos ## all that is claimed of the GPU backends, on this machine's GPU; without one, that the check runs
	@$(BIN)/python -m bench.gpu_check $(ARGS)

k8s: $(TESTS) ## render and validate the Kubernetes manifests
	@$(BIN)/python -m pytest -q tests/k8s

wheel: $(TESTS) ## a wheel in build/dist
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -m pip -qq wheel --no-deps -w build/dist .
	@ls build/dist

clean: ## what was built, but not the environment
	@rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis bench/results
	@rm -f $(RUNS) $(TESTS) executor_svc/kernels/*.so executor_svc/kernels/cuda/*.so jitney/*/v1/*_pb2*.py jitney/*/v1/*_pb2*.pyi
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## clean, and the environment
	@rm -rf $(VENV)
