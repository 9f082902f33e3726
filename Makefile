# make demo, make test, make test-all (before a release), make docs: each makes .venv, installs, and runs. PYTHON: any Python from 3.11 on.
PYTHON ?= python3
EXTRAS ?= test,parity
# The tests start many processes; without .pyc files each would compile what it imports of transformers anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all serve-test docs clean

demo: .venv/installed
	rm -rf runs/demo
	.venv/bin/python -m lpes_jax.search --preset quick --output-path runs/demo

test: ONLY = not fuzz and not long and not serving
test-all: ONLY = not fuzz and not serving
test test-all: .venv/installed-$(EXTRAS)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright
	.venv/bin/python -m pytest -m '$(ONLY)' --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Each server in a venv of its own, .serve/NAME: made where it is missing, and its tests skipped, with the reason, where it cannot be.
serve-test: .venv/installed-$(EXTRAS)
	.venv/bin/python -m pytest -m serving tests/serving

# The site, in build/site. Every link between files is checked. The notebook takes minutes; RUN_NOTEBOOK=short or false saves them.
docs: .venv/installed-docs
	.venv/bin/mkdocs build --strict

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --editable .
	touch $@

.venv/installed-$(EXTRAS): pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]'
	touch $@

.venv/installed-docs: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv .serve runs build dist *.egg-info
