# Ramet: `make serve` and `make test` do all the set-up they need; both may be run again at any time.
PYTHON ?= python3
VENV   ?= .venv
# The one version that Ramet is tested with; TORCH="torch>=2.6" or a wheel's path takes another.
TORCH  ?= torch==2.13.0
ARGS   ?=

STAMP := $(VENV)/.installed

COMPOSE ?= docker compose

.PHONY: serve test lint bench-prefix compose clean

$(STAMP): pyproject.toml
	@echo "==> setting up $(VENV) (a few minutes the first time)"
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --progress-bar on "$(TORCH)"
	$(VENV)/bin/python -m pip install --progress-bar on -e ".[dev]"
	@touch $@

serve: $(STAMP)
	$(VENV)/bin/ramet serve $(ARGS)

test: $(STAMP)
	$(VENV)/bin/ramet fetch-model
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench-prefix: $(STAMP)
	$(VENV)/bin/ramet bench prefix $(ARGS)

compose:
	docker/make-secrets.sh
	cd docker && $(COMPOSE) up --build $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
