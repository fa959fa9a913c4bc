.PHONY: demo test lint format clean

READY := .venv/.ready

demo: $(READY)
	.venv/bin/sharpdraft demo

test: lint
	.venv/bin/pytest -q -m "not slow"

lint: $(READY)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

format: $(READY)
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml scripts/setup.sh
	scripts/setup.sh
	touch $@
