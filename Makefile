# The commands of this repository; `make help` lists them. Each sets up what it needs in .venv once,
# and again when pyproject.toml or the pinned versions change.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
GATE_FLAGS ?=
SCORE_FLAGS ?=
BENCH_FLAGS ?=
TEST_FLAGS ?=
FAULT_FLAGS ?=
ENGINES ?= vllm==0.33.0 sglang==0.5.23

# Many images set it. Without bytecode each of a run's processes starts a second later, and the
# tests start hundreds.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
CONSTRAINTS := ci/constraints.txt
FLASHINFER_NEEDS := ci/requirements-flashinfer-cpu.txt
PINS := pyproject.toml __init__.py $(CONSTRAINTS) $(FLASHINFER_NEEDS)
# --no-compile: 31 s instead of 54; what is imported is compiled then.
# --no-warn-conflicts: flashinfer-python is installed without its CUDA packages on purpose.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-input \
       --progress-bar off --no-compile --no-warn-conflicts --constraint $(CONSTRAINTS)

##@ Main
.PHONY: gate
gate: setup ## Kernelproof's main job: check what this machine can run (GATE_FLAGS=...)
	$(BIN)/kernelproof gate $(GATE_FLAGS)

.PHONY: test
# worksteal: a few tests take a minute, and stand side by side in the order of collection.
test: setup-test browser ## The tests of Kernelproof itself (TEST_FLAGS="tests/reference -x")
	$(BIN)/python -m pytest -n auto --dist worksteal $(TEST_FLAGS)

.PHONY: score
score: setup ## Which seeded bugs the laws kill, and how fast (SCORE_FLAGS=...)
	$(BIN)/kernelproof score $(SCORE_FLAGS)

.PHONY: triton-faults
triton-faults: setup ## Each fault of our Triton kernels by a whole check; exit code 1 is right (FAULT_FLAGS=...)
	@$(BIN)/python -c 'from kernelproof.properties.seeded.triton_bugs import BUGS; print(*(bug.reference for bug in BUGS), sep="\n")' | \
	while read -r fault; do \
	  start=$$(date +%s); \
	  $(BIN)/kernelproof check $$fault --profile gate $(FAULT_FLAGS) </dev/null >/dev/null 2>&1 && code=0 || code=$$?; \
	  echo "$$fault: exit code $$code, $$(($$(date +%s) - start)) s"; \
	done

.PHONY: engine-faults
engine-faults: setup engines ## Each fault in vLLM's and SGLang's kernels by a whole check, and the files as they are (FAULT_FLAGS=...)
	$(BIN)/python tests/faults/engine_faults.py $(FAULT_FLAGS)

.PHONY: score-evidence
# A new bug is added without the others: BUG=its-name. A score that falls short is kept too: alone, a
# bug that takes more than 10 s to kill is such a one.
score-evidence: setup ## Scores into fixtures/evidence (BUG=NAME or OPERATION=merge_state; default: all)
	@run=$$(mktemp); trap 'rm -f "$$run"' EXIT; status=0; \
	$(BIN)/kernelproof score --profile gate --json "$$run" \
	  $(addprefix --bug ,$(BUG)) $(addprefix --operation ,$(OPERATION)) $(SCORE_FLAGS) || status=$$?; \
	if [ $$status -gt 1 ]; then exit $$status; fi; \
	$(BIN)/python -m kernelproof.ci.evidence "$$run"

.PHONY: deck
deck: setup ## The problems that a check asks first, into fixtures/deck (OPERATION=merge_state; default: all)
	$(BIN)/python -m kernelproof.ci.score.deck $(OPERATION)

.PHONY: faults
faults: setup-test ## Misbehaving kernels beside honest ones (RUNS=1000 SEED=7: at random)
	$(BIN)/python tests/faults/harness.py $(if $(RUNS),--runs $(RUNS) --seed $(or $(SEED),0)) $(FAULT_FLAGS)

.PHONY: bench
bench: setup ## Time, memory and tightness of the oracle, isolation, throughput (BENCH_FLAGS=tightness)
	$(BIN)/python -m kernelproof.tests.bench $(BENCH_FLAGS)

.PHONY: engines
# 375 MB are fetched and 120 MB kept; nothing of it is run.
engines: $(VENV)/.created ## The source of vLLM and SGLang, in .engines, for `--from` and `merge --uses` (ENGINES="vllm==0.33.0")
	@ci/engines.sh $(BIN)/python .engines $(ENGINES)

.PHONY: findings
findings: ## Surprises of other libraries: each script of findings/, from public packages (needs the network)
	@status=0; for script in findings/*.sh; do \
	  echo "== $$script"; sed -n 2p "$$script"; bash "$$script" || { echo "$$script: no longer so"; status=1; }; \
	done; exit $$status

##@ Checks of a change (.ci/run runs them all)
.PHONY: lint
lint: setup-dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: setup-dev .build/kernelproof ## mypy, strict, over the package and its tests; pyright as a user has it
	MYPYPATH=.build $(BIN)/mypy --package kernelproof
	$(BIN)/basedpyright --pythonpath $(BIN)/python

.PHONY: layers
layers: setup-dev ## import-linter: who may import whom
	$(BIN)/lint-imports --no-logo

.PHONY: check
check: setup-dev ## Before a commit, in a minute: lint, types, layers, the tests nearest to what changed
	@started=$$(date +%s); $(MAKE) --no-print-directory lint types layers; \
	$(BIN)/python tests/nearest.py --seconds $$((left = 60 - $$(date +%s) + started, left > 15 ? left : 15))

.PHONY: docs
docs: setup-dev ## The documentation as a site, in build/docs, with its generated pages; warnings are errors (needs Python 3.11)
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; \
	  then $(BIN)/python -m sphinx -q -W --keep-going -b html -d build/docs-trees docs build/docs; \
	  else echo "docs: left out, Sphinx needs Python 3.11"; fi

.PHONY: docs-links
docs-links: setup-dev ## The links out of the documentation; needs the network
	$(BIN)/python -m sphinx -q -b linkcheck -d build/docs-trees docs build/docs-links

.PHONY: pipelines
pipelines: setup-dev ## The pipelines of ci/pipelines: schemas, shellcheck, hadolint, actionlint
	$(BIN)/python -m pytest -q tests/ci/test_pipelines.py

##@ Set-up
.PHONY: setup
setup: $(VENV)/.installed-gate ## What `make gate` needs, in .venv (PYTHON=python3.12)

.PHONY: setup-test
setup-test: $(VENV)/.installed-test ## What `make test` needs

.PHONY: setup-dev
setup-dev: $(VENV)/.installed-dev ## What all of them need

.PHONY: browser
browser: ## Chromium and its driver, in which the tests look at the HTML pages (apt-get, as root)
	@ci/browser.sh

.PHONY: clean
clean: ## Remove .venv, builds and caches
	rm -rf $(VENV) .build .engines build dist *.egg-info .hypothesis .import_linter_cache .kernelproof \
	  .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "set-up: $(PYTHON) must be Python 3.10 or newer; name one with PYTHON=..." >&2; exit 2; }
	@echo "set-up: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# $(call install,EXTRAS): the package, editable, and flashinfer-python without its CUDA packages.
define install
@echo "set-up: installing kernelproof[$(1)] with torch, and its pinned versions (about a minute)"
@$(PIP) --requirement $(FLASHINFER_NEEDS) --editable '.[$(1)]'
@echo "set-up: installing flashinfer-python without its CUDA packages"
@$(PIP) --no-deps flashinfer-python
endef

# Each holds what the one before it does, so the larger one's stamp serves for the smaller too.
$(VENV)/.installed-gate: $(VENV)/.created $(PINS)
	$(call install,suite$(comma)triton)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created $(PINS)
	$(call install,test$(comma)triton)
	@touch $(VENV)/.installed-gate $@

$(VENV)/.installed-dev: $(VENV)/.created $(PINS)
	$(call install,dev$(comma)triton)
	@touch $(VENV)/.installed-gate $(VENV)/.installed-test $@

comma := ,

# mypy follows no import hook, as an editable install uses one; a link of the package's name it does.
.build/kernelproof:
	@mkdir -p $(@D)
	@ln -sfn .. $@
