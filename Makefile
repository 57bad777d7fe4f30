# The commands a newcomer types. Everything happens in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOB := deployments/jobs/flights.yaml
RECURRENCES ?= 20

# Which examples hypothesis tries; make prints it, and `make test SEED=...` tries the same again.
SEED ?= $(shell date +%s)
PYTEST = $(BIN)/pytest -q -n 3 --dist loadgroup --hypothesis-seed=$(SEED)

.PHONY: demo test unit check docs site clean help

help:  ## list these targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found; install Python 3.11 or later, or say make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "zeus_flows needs Python 3.11 or later; try make PYTHON=python3.12")'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[flights]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(VENV)/.installed  ## run 20 recurrences of the embedded job on a simulated V100; again: 20 more
	@mkdir -p .demo
	@$(BIN)/zeus-flows run $(JOB) --recurrences $(RECURRENCES) --tracking-uri sqlite:///.demo/mlflow.db

test: $(VENV)/.installed-dev  ## run every test; those with servers and processes take minutes
	$(PYTEST)

unit: $(VENV)/.installed-dev  ## run the tests that need no server, no MLflow and no process: under a minute
	$(PYTEST) -m 'not slow'

check: $(VENV)/.installed-dev  ## lint, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev  ## write docs/reference/cli.md and job-file.md anew
	$(BIN)/python docs/generate_cli_reference.py

site: $(VENV)/.installed-dev  ## build the documentation as a site into build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:  ## forget the venv and the demo's results
	rm -rf $(VENV) .demo build *.egg-info
