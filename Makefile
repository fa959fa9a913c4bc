.PHONY: demo test test-vllm test-vllm-smoke lint format clean

READY := .venv/.ready
READY_VLLM := .venv-vllm/.ready

demo: $(READY)
	.venv/bin/sharpdraft demo

test: lint
	.venv/bin/pytest -q -m "not slow"

# Real vLLM on the CPU, one engine after another.
test-vllm: $(READY_VLLM)
	.venv-vllm/bin/python -m pytest -q tests/adapters -k vllm

# One engine with the plugin, two minutes.
test-vllm-smoke: $(READY_VLLM)
	.venv-vllm/bin/python -m pytest -q tests/adapters/test_vllm_smoke.py

lint: $(READY)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports --no-cache
	.venv/bin/mypy

format: $(READY)
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf packages/*/build packages/*/dist

$(READY): pyproject.toml packages/sharpdraft-smollm2/pyproject.toml scripts/setup.sh
	scripts/setup.sh
	touch $@

$(READY_VLLM): pyproject.toml packages/sharpdraft-smollm2/pyproject.toml scripts/setup-vllm.sh
	scripts/setup-vllm.sh
	touch $@
