# `make demo` and `make test` do all their set-up themselves, with plain pip into .venv.
PYTHON ?= python3
BIN := .venv/bin
# What is checked: modules that a user puts beside them, such as README's my_models.py, are the user's.
CODE := distill tests benchmarks docs/hooks

.PHONY: demo test test-slow horovod lint docs clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch .venv/ready

demo: .venv/ready  ## the main job: a distilled student and its report in runs/distilbert_gutenberg
	$(BIN)/python -m distill +recipe=distilbert_gutenberg

# Built from source once (3 minutes, a C++ compiler needed); only backend=horovod and its tests want it.
.venv/horovod: .venv/ready
	$(BIN)/python -m distill.distributed.install_horovod
	touch .venv/horovod

horovod: .venv/horovod

test test-slow: .venv/ready
	@$(MAKE) --no-print-directory .venv/horovod || echo "Going on without Horovod: its tests are skipped."
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(if $(filter test-slow,$@),-m 'slow and not gpu')

lint: .venv/ready
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

# The manual in site/. Nothing is fetched while it is built; a dead link or a missing docstring ends it (not with --quiet).
.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch .venv/docs

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf .venv runs site
