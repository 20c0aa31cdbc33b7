# What a contributor runs; `make help` lists it. On a machine without network, `make test-gpu PYTHON=python3`
# uses an existing Python in which the package is installed, and installs nothing.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-tools fuzz check lint format types docs pages wheel figures matrix test-isa test-integrations test-distributed \
	pictures proof paper bench test-gpu emulated gpu-check

VENV := .venv/bin/python
PYTHON := $(VENV)
ifeq ($(PYTHON),$(VENV))
READY := .venv/.ready
DEMO := .venv/.demo
DOCS := .venv/.docs
TOOLS := .venv/.tools
INTEGRATIONS := .venv/.integrations
PROOF := .proof/.ready
endif

# The first Python new enough, able to make environments, and with the headers that Inductor's C++ includes.
USABLE := import ensurepip, os, sys, sysconfig as s; \
	sys.exit(not ((3, 11) <= sys.version_info < (3, 15) and os.path.exists(s.get_path("include") + "/Python.h")))
BASE = $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	if $$p -c '$(USABLE)' 2>/dev/null; then command -v $$p; exit; fi; done)
NEEDS_BASE = @test -n "$(BASE)" || { echo "found no Python 3.11 to 3.14 with ensurepip and headers; install one \
	(Debian: python3-venv python3-dev), or name it: make $(MAKECMDGOALS) BASE=/path/to/python"; exit 1; }

# Kept between processes, whatever a container says: each that collects tests else compiles them for ten seconds.
export PYTHONDONTWRITEBYTECODE :=
JOBS := $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))
PYTEST := -P -m pytest
# Tests are dealt by the seconds that were noted of each file, and those left over change hands.
TOGETHER = -n $(JOBS) --dist worksteal --timeout=600
SLOW := # make test SLOW=1 runs the tests marked slow or ci too
SEED := # make test SEED=7 draws other inputs than it does without
OFF_BY_ONE := # make test OFF_BY_ONE=1: sqrt, exp and others of float32 as on a CPU that doesn't round them right
ARGS :=
# One GPU serves some processes; none needs a compiler pool of its own. Without the plugins tests run one by one.
GPU_PLUGINS = $(shell $(PYTHON) -c 'import pytest_timeout, xdist' 2>/dev/null && printf %s '-n $(JOBS) --timeout=300')
MATRIX := 2.11 2.15
MADE_UP := AMPCOMPILE_TEST_GPU=made-up TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 PYTHONHASHSEED=0
OLDEST := .matrix/$(firstword $(MATRIX))/bin/python
# What may depend on the units that a CPU has.
ISA_SAMPLE := tests/behaviour/test_products.py tests/kernels/test_packed_linear.py tests/kernels/test_packed_conv.py \
	tests/kernels/test_attention_backward.py tests/passes/before/test_pack_weights.py \
	tests/weights/test_compiled.py
EMULATED_SAMPLE := tests/weights tests/kernels tests/rules tests/optim \
	tests/behaviour/test_streams_and_captures.py tests/behaviour/test_gpt_training.py tests/behaviour/test_fp8.py \
	tests/scaler/test_gpu.py::test_two_devices_decide_together
# What is beside the package; the results of the proof are those of one torch.
TOOLS_TESTS := tests/benchmarks tests/examples tests/proof
CORE := $(TOOLS_TESTS:%=--ignore=%)

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

demo: $(DEMO) ## train a small GPT on the standard library's source, beside eager autocast and Inductor
	$(PYTHON) -m examples.train_gpt $(ARGS)

test: $(READY) ## the package's tests, the same in each run; SLOW=1 adds what is marked slow (an hour) or ci
	$(if $(SEED),AMPCOMPILE_TEST_SEED=$(SEED)) OMP_NUM_THREADS=1 PYTHONHASHSEED=0 \
		$(if $(OFF_BY_ONE),PYTHONPATH=$(CURDIR)/tests/off_by_one) \
		$(PYTHON) $(PYTEST) $(TOGETHER) $(CORE) --ignore=tests/integrations $(if $(SLOW),-m "") $(ARGS)

test-tools: $(READY) ## the tests of benchmarks/, examples/ and proof/, and of softgpu/
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(PYTHON) $(PYTEST) $(TOGETHER) $(TOOLS_TESTS) $(if $(SLOW),-m "") $(ARGS)
	$(PYTHON) $(PYTEST) -c softgpu/pyproject.toml softgpu/tests

fuzz: $(READY) ## the tests with inputs nobody drew yet: MINUTES=3, or DRAWS=2000 in all; goes on where it stopped
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(PYTHON) -m tests.fuzz --jobs $(JOBS) $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(DRAWS),--draws $(DRAWS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

check: lint types test test-tools ## formatting, lint, types, tests

lint: $(TOOLS) ## formatting and lint
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

format: $(TOOLS) ## rewrite files to the format that lint checks
	$(PYTHON) -m ruff check --fix-only .
	$(PYTHON) -m ruff format .

# Type checkers can't follow the editable install's map of sub-packages; they can follow links.
types: $(TOOLS) ## mypy
	@rm -rf .types && mkdir -p .types/ampcompile
	@cd .types/ampcompile && ln -s ../../passes ../../kernels ../../ampcompile/[!_]* ../../ampcompile/__*.py .
	MYPYPATH=.types $(PYTHON) -m mypy -p ampcompile -p benchmarks -p examples -p proof

# -E: a page that isn't read again keeps its warnings to itself.
docs: $(DOCS) ## a site of all pages, in build/docs: tutorials run and are checked, charts are drawn
	$(PYTHON) -m examples.tutorials
	$(PYTHON) -m benchmarks.charts
	$(PYTHON) -m sphinx -q -E -W --keep-going docs build/docs
	$(PYTHON) -m tests.search build/docs
	@echo build/docs/index.html

matrix: $(READY) $(MATRIX:%=.matrix/%/.ready) ## the suite's core on the oldest, the newest and the pinned torch; a GPU's chains on the oldest; SHARD=1/4
	@failed=; for python in $(MATRIX:%=.matrix/%/bin/python) $(PYTHON); do \
		$$python -c 'import torch; print("torch", torch.__version__, flush=True)'; \
		OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $$python $(PYTEST) $(TOGETHER) $(CORE) \
			$(if $(SHARD),--shard=$(SHARD)) $(ARGS) || failed="$$failed $$python"; \
	done; \
	$(if $(filter-out 1/%,$(SHARD))$(ARGS),,$(MADE_UP) $(OLDEST) $(PYTEST) -m emulated $(TOGETHER) --timeout=1200 \
		tests/emulated/test_chains.py || failed="$$failed chains";) \
	test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

test-isa: $(READY) ## the suite's core as on older CPUs: AVX2, AVX-512, all that is there; SAMPLE=1: minutes of the first two
	@failed=; for isa in AVX2 AVX512_CORE $(if $(SAMPLE),,ALL); do echo "ONEDNN_MAX_CPU_ISA=$$isa"; \
		vectors=; [ $$isa != AVX2 ] || vectors=ATEN_CPU_CAPABILITY=avx2; \
		env ONEDNN_MAX_CPU_ISA=$$isa $$vectors OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(PYTHON) $(PYTEST) \
			$(TOGETHER) $(if $(SAMPLE),$(ISA_SAMPLE),$(CORE)) $(ARGS) || failed="$$failed $$isa"; \
	done; test -z "$$failed" || { echo "failed as:$$failed"; exit 1; }

test-integrations: $(INTEGRATIONS) ## amp in the loops of Accelerate, transformers, Lightning, PEFT and TRL
	OMP_NUM_THREADS=1 $(PYTHON) $(PYTEST) $(TOGETHER) tests/integrations -m "not slow" $(ARGS)

test-distributed: $(READY) ## all tests of several processes: each way to share a model x whole, by block x loops
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(PYTHON) $(PYTEST) -m "" tests/sharding tests/scaler/test_distributed.py $(ARGS)

pages: $(DOCS) ## what programs write in docs/: the reference, the tutorials' output, the charts
	$(PYTHON) docs/reference.py
	$(PYTHON) -m examples.tutorials --write
	$(PYTHON) -m benchmarks.charts

wheel: $(READY) ## dist/*.whl, tried in an environment of its own
	$(PYTHON) -m tests.wheel

figures: $(READY) ## the size of the repository beside its limits; ARGS=--write puts the table into CONTRIBUTING
	$(PYTHON) -m tests.figures $(ARGS)

pictures: $(READY) ## docs/pictures: the page of casts (needs Chromium)
	$(PYTHON) -m tests.pictures

proof: $(PROOF) ## what holds, case by case, as tables; goes on where it stopped; PART=ops ALL=1 SHARD=1/4 ARGS=--show
	$(if $(PROOF),.proof/bin/python,$(PYTHON)) -m proof $(PART) $(if $(ALL),--all) $(if $(SHARD),--shard $(SHARD)) $(ARGS)

test-gpu: $(READY) ## the tests that need a CUDA device; where torch is a CPU build, on a made-up one
	@test -n "$(GPU_PLUGINS)" || echo "without pytest-xdist or pytest-timeout: one process, and no limit to a test's time"
	TORCHINDUCTOR_COMPILE_THREADS=1 $(PYTHON) $(PYTEST) -m gpu $(GPU_PLUGINS) $(ARGS)

# With twice the time: some of these tests launch thousands of kernels.
emulated: $(READY) ## what a GPU runs, on a made-up one: the tests marked gpu, models, chains; SAMPLE=1: minutes
	$(MADE_UP) $(PYTHON) $(PYTEST) -m "gpu or emulated" $(TOGETHER) --timeout=1200 $(if $(SAMPLE),$(EMULATED_SAMPLE)) $(ARGS)

bench: $(READY) ## peers on models, on this CPU; PLAN=calls, scaler: what a call costs, an optimizer step
	$(PYTHON) -m benchmarks $(PLAN) $(ARGS)

paper: $(READY) ## what a GPU would run, counted without one; ALL=1 counts more models
	$(PYTHON) -m benchmarks.paper $(if $(ALL),--all --options) $(ARGS)

# Installs nothing. On a machine for 15 minutes it runs twice: the second time it measures what was left.
gpu-check: ## on a CUDA device, 7 minutes: its tests, then training steps in every way; ARGS=--tiny rehearses it
	$(PYTHON) -m benchmarks gpu-check --rounds 5 --seconds 405 $(ARGS)

$(VENV):
	$(NEEDS_BASE)
	$(BASE) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | $(VENV)
	@echo "installing torch and the package into .venv (minutes, once)"
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

.venv/.docs: pyproject.toml constraints.txt | $(VENV)
	@echo "installing torch, the package and Sphinx into .venv (minutes, once)"
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

.venv/.ready: pyproject.toml constraints.txt | $(VENV)
	@echo "installing torch and the package into .venv (minutes, once)"
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

.venv/.tools: .venv/.ready
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv/.integrations: .venv/.ready
	$(PYTHON) -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[integrations]'
	@touch $@

# On top of .venv, and apart from it: torchvision's wheels are for CUDA, and where one is there that can't be loaded,
# transformers can't be imported without the stand-in of proof/models/missing_ops.py.
.proof/.ready: .venv/.ready
	@echo "installing timm, torchvision and others into .proof (a minute, once)"
	$(PYTHON) -m venv --without-pip .proof
	$(PYTHON) -c 'import site; print("import site; site.addsitedir(%r)" % site.getsitepackages()[0])' \
		> $$(.proof/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth
	.proof/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[proof]'
	@touch $@

.matrix/%/.ready: pyproject.toml constraints.txt
	$(NEEDS_BASE)
	@echo "installing torch $* into .matrix/$* (minutes, once)"
	@test -x .matrix/$*/bin/python || $(BASE) -m venv .matrix/$*
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > .matrix/$*/constraints.txt
	.matrix/$*/bin/python -m pip install -q --disable-pip-version-check -c .matrix/$*/constraints.txt \
		"torch==$*.*" -e '.[test]'
	@touch $@
