# `make serve` and `make test` do all the set-up that they need; both may be run again at any time.
PYTHON  ?= python3
VENV    ?= .venv
COMPOSE ?= docker compose
ARGS    ?=
# Number of processes for the tests, which share out the test files.
WORKERS ?= 3
# Ramet is tested with this version only. TORCH="torch>=2.6" or the path of a wheel chooses another.
TORCH   ?= torch==2.13.0
# Not empty where there is an NVIDIA driver. NVIDIA= leaves FlashInfer out, and takes torch for CPUs.
NVIDIA  ?= $(wildcard /proc/driver/nvidia)$(shell command -v nvidia-smi)
# The index to try first for torch. Without a GPU it is PyTorch's own, whose CPU package has no CUDA.
TORCH_INDEX ?= $(if $(NVIDIA),,https://download.pytorch.org/whl/cpu)

PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar on
# Checks within seconds whether the index answers. pip would retry for minutes.
REACHES = $(VENV)/bin/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1] + "/torch/", timeout=5)' 2>/dev/null
# The line of a log that says what failed.
WHY = grep -m 1 ERROR $(VENV)/$(1).log || tail -n 1 $(VENV)/$(1).log

.PHONY: serve test test-all soak clients lint mutants docs pictures pins bench bench-prefix compose wheel wheel-arm test-arm check-macos count-arm clean

# A stamp for each part of the set-up: torch, what serving needs, and extras of pyproject.toml (bench, dev).
$(VENV)/.torch:
	@test -x $(VENV)/bin/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "ERROR: Ramet needs Python 3.11 or later, and $(PYTHON) is %d.%d: PYTHON=python3.12 names another" % sys.version_info[:2])'
	@echo "==> a virtual environment in $(VENV), once: a few minutes, 0.4 GB to fetch, 1.2 GB on the disk; with CUDA 3 GB and 8 GB"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
ifneq ($(and $(TORCH_INDEX),$(filter torch%,$(TORCH))),)
	@echo "==> $(TORCH) from $(TORCH_INDEX): 0.2 GB if it is built for CPUs"
	@{ $(REACHES) $(TORCH_INDEX) && $(PIP) --no-deps --index-url $(TORCH_INDEX) "$(TORCH)"; } || \
	  echo "==> $(TORCH_INDEX) does not give it; the plain package follows"
endif
	@$(VENV)/bin/python -m pip show --quiet torch 2>/dev/null || \
	  echo "==> $(TORCH), the plain package: 3 GB where it brings CUDA's libraries (on Linux), else 0.2 GB"
	$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml setup.py $(wildcard runtime/execution/native/src/*)
	@echo "==> the packages that serving needs: 0.1 GB, and a minute for the CPU kernels where there is a C++ compiler"
	$(PIP) --editable .
	@touch $@

$(VENV)/.%: $(VENV)/.serve docker/requirements.py
	@echo "==> the packages of ramet[$*]: up to 0.15 GB"
	$(VENV)/bin/python docker/requirements.py $* > $(VENV)/$*.txt
	$(PIP) --requirement $(VENV)/$*.txt
	@touch $@

# FlashInfer, and by its own command the wheel of compiled kernels for torch's CUDA, which is not on PyPI.
$(VENV)/.cuda: $(VENV)/.serve docker/requirements.py
	@echo "==> FlashInfer and its compiled kernels, for NVIDIA GPUs: about 2 GB to fetch"
	@$(VENV)/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' || \
	  { echo "ERROR: this torch is built for CPUs; with the driver, make clean and make serve" >&2; exit 1; }
	$(VENV)/bin/python docker/requirements.py cuda > $(VENV)/cuda.txt
	$(PIP) --requirement $(VENV)/cuda.txt
	@PIP_RETRIES=1 $(VENV)/bin/python -m flashinfer install-jit-cache-wheel 2> $(VENV)/kernels.log || \
	  echo "==> no compiled kernels: $$($(call WHY,kernels)); the first start compiles with nvcc and a C++ compiler"
	@touch $@

# The same for `make serve`, which goes on without it.
$(VENV)/.gpu: $(VENV)/.serve
	@$(MAKE) --no-print-directory $(VENV)/.cuda 2> $(VENV)/gpu.log || \
	  echo "==> no FlashInfer: $$($(call WHY,gpu)); torch computes attention. \`make extra-cuda\` tries again"
	@touch $@

# The packages of an extra. CONTRIBUTING.md lists the extras.
extra-load extra-bench extra-otel extra-tiers extra-ray extra-cuda extra-reasoning extra-dev extra-mutants: extra-%: $(VENV)/.%
	@echo "==> ramet[$*] is installed in $(VENV)"

serve: $(VENV)/.serve $(if $(NVIDIA),$(VENV)/.gpu)
	$(VENV)/bin/ramet serve $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/ramet fetch-model
	$(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --hypothesis-profile=repeat $(ARGS)

# What `make test` skips where Ray, a Redis and the wheels of vLLM and SGLang are missing. Not in CI: 0.7 GB.
test-all: $(VENV)/.dev $(VENV)/.ray $(VENV)/wheels
	@command -v valkey-server || command -v redis-server || \
	  { echo "==> a Redis is missing; on Debian: apt-get install redis-server"; exit 1; }
	$(VENV)/bin/ramet fetch-model
	RAMET_EVENT_WHEELS=$(VENV)/wheels $(VENV)/bin/python -m pytest --hypothesis-profile=repeat $(ARGS) tests/server/ray \
	  tests/runtime/features/kv_events/test_consumers.py tests/runtime/features/tiers/test_redis.py tests/runtime/features/tiers/test_stores.py

$(VENV)/wheels: $(VENV)/.torch
	$(VENV)/bin/python -m pip download --disable-pip-version-check --no-deps --dest $@ vllm==0.32.0 sglang==0.5.23

# The long tests of a live server: bad clients, lost engines, a mixed load. RAMET_SOAK_SCALE=0.1 makes them shorter.
soak: $(VENV)/.dev
	$(VENV)/bin/ramet fetch-model
	$(VENV)/bin/python -m pytest -m soak tests/soak $(ARGS)

# make clients ARGS="openai_python codex": other people's clients, each in an environment of its own. Not in CI.
clients: $(VENV)/.dev
	$(VENV)/bin/python tests/clients/matrix.py --home $(VENV)/clients $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/mypy

# make mutants ARGS="'radix.tree*'": does a test fail for every small change of a module? Not in CI: some minutes.
mutants: $(VENV)/.mutants
	$(VENV)/bin/mutmut run $(ARGS)

# The generated pages of the server.
docs: $(VENV)/.serve
	env -u RAMET_CACHE -u XDG_CACHE_HOME $(VENV)/bin/ramet options > server/OPTIONS.md
	$(VENV)/bin/python -m server.fields > server/FIELDS.md

# The pictures of HOW.md, from what an engine does with real prompts.
pictures: $(VENV)/.bench
	$(VENV)/bin/python -m loadgen.experiments.micro.pictures server/static

# Write the images' pins, with the hashes of the files that they can install. ARGS=--upgrade takes newer versions.
COMPILE = $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --no-emit-package torch \
  $(if $(filter torch%,$(TORCH)),--torch-backend cpu)
pins: $(VENV)/.torch
	$(PIP) --quiet uv
	{ for group in "bench otel tiers ray" build router; do $(PYTHON) docker/requirements.py $$group; done | grep -v '^torch'; \
	  echo "$(TORCH)"; } > $(VENV)/pins.in
	$(COMPILE) --generate-hashes --custom-compile-command "make pins" --output-file docker/constraints.txt $(ARGS) - \
	  < $(VENV)/pins.in
	$(COMPILE) --constraint docker/constraints.txt --format pylock.toml --output-file $(VENV)/pylock.toml - < $(VENV)/pins.in
	$(PYTHON) docker/requirements.py --shorten $(VENV)/pylock.toml

# make bench ARGS="tree"; make bench-prefix
bench bench-prefix: $(VENV)/.bench
	$(VENV)/bin/ramet $(subst -, ,$@) $(ARGS)

compose:
	docker/make-secrets.sh
	cd docker && $(COMPOSE) up --build $(ARGS)

# Wheels in dist, which need no compiler where they are installed: pip install dist/ramet-*.whl
wheel: $(VENV)/.torch
	$(PIP) --quiet build
	$(VENV)/bin/python -m build

# The same for Linux on ARM, by Debian's g++-aarch64-linux-gnu. It fits this version of Python.
wheel-arm: has-g++-aarch64-linux-gnu $(VENV)/.torch
	$(PIP) --quiet build
	rm -f dist/ramet-*_aarch64.whl
	_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ SETUPTOOLS_EXT_SUFFIX=$$( \
	  $(VENV)/bin/python -c 'import sys; print(f".{sys.implementation.cache_tag}-aarch64-linux-gnu.so")') \
	  $(VENV)/bin/python -m build --quiet --wheel
	@$(VENV)/bin/python -m zipfile --list dist/ramet-*_aarch64.whl | grep _neon || \
	  { echo "ERROR: no kernels were compiled for ARM; the compiler's words are above" >&2; exit 1; }

# That wheel in emulation: a request to each of two servers (GGUF=FILE: and to one of this file), and the tests of the
# kernels. Not in CI: an hour, root's rights.
test-arm: has-qemu-user-static has-mmdebstrap wheel-arm
	$(VENV)/bin/python docker/requirements.py > $(VENV)/serve.txt
	$(PIP) --quiet --requirement $(VENV)/serve.txt
	GGUF=$(GGUF) tests/arm/run.sh $(VENV)/bin/python dist/ramet-*_aarch64.whl \
	  $(or $(ARGS),tests/runtime/execution/native tests/runtime/engine/test_exact.py)

# A package of Debian, by one of its programs.
has-g++-aarch64-linux-gnu: PROGRAM = aarch64-linux-gnu-g++
has-qemu-user-static: PROGRAM = qemu-aarch64-static
has-qemu-user: PROGRAM = qemu-aarch64
has-clang: PROGRAM = clang++
has-%:
	@command -v $(or $(PROGRAM),$*) > /dev/null || { echo "ERROR: $(or $(PROGRAM),$*) is missing; on Debian: apt-get install $*" >&2; exit 1; }

# The same sources as clang reads them for macOS.
check-macos: has-clang has-g++-aarch64-linux-gnu $(VENV)/.torch
	tests/arm/macos.sh $(VENV)/bin/python

# The instructions of a prompt and of a token of decode, with the kernels for AVX2 and for ARM.
count-arm: has-qemu-user has-g++-aarch64-linux-gnu $(VENV)/.torch
	tests/arm/count.sh $(VENV)/bin/python

# ARGS=all also deletes the models that were fetched or converted, and the secret of tenants' ids.
clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find runtime/execution/native -name '*.so' -delete
ifeq ($(ARGS),all)
	rm -rf "$(or $(RAMET_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ramet)"
endif
