# make verify | test | lint | audit | bench | notebooks | figures | clean, each with ARGS="..." for the tool behind it.
# Nothing has to be installed first: every target makes .venv where it is missing or out of date.

PYTHON ?= python3
ARGS ?=

VENV := .venv
STAMP := $(VENV)/.stamp
PY := $(VENV)/bin/python

# The checkout is what runs, also where the package could not be installed.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# module:distribution of everything but torch and triton
NEEDED := numpy:numpy ml_dtypes:ml_dtypes rich:rich scipy:scipy \
  matplotlib:matplotlib pytest:pytest xdist:pytest-xdist hypothesis:hypothesis mpmath:mpmath \
  nbmake:nbmake ruff:ruff mypy:mypy safetensors:safetensors

.PHONY: verify test lint audit bench notebooks figures clean

verify: $(STAMP)
	$(PY) -m dsv4num verify $(ARGS)

# Plugins that another Python brings along are not loaded: a warning of theirs would be an error here.
test: $(STAMP)
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PY) -m pytest -p xdist -n 2 $(ARGS)

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy

audit: $(STAMP)
	$(PY) -m dsv4num audit $(ARGS)

bench: $(STAMP)
	$(PY) benchmarks/gpu.py $(ARGS)

notebooks: $(STAMP)
	PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(PY) -m pytest -p xdist -n 2 -p nbmake.pytest_plugin \
	  --nbmake notebooks $(ARGS)

# Runs the notebooks, saves their outputs, and copies the figures of the documents out of them.
figures: $(STAMP)
	$(PY) -m tools.figures --execute

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A Python that already has torch and triton (a GPU machine) keeps them, and whatever else it has: a
# .pth file shows its packages to the new environment (--system-site-packages would not show those of
# an outer environment). Only what cannot be imported is installed, in whatever version suits the
# rest, and no network is no error. Any other Python gets everything pinned in constraints.txt.
$(STAMP): pyproject.toml constraints.txt
	rm -rf $(VENV)
	@set -e; \
	if $(PYTHON) -c 'import torch, triton' 2>/dev/null; then \
	  echo "using the torch and triton of $(PYTHON)"; \
	  $(PYTHON) -m venv --without-pip $(VENV); \
	  $(PYTHON) -c 'import sys; \
[print(f"import site; site.addsitedir({p!r})") for p in sys.path if p.endswith("-packages")]' \
	    > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"; \
	  missing=$$($(PY) -c 'import sys; from importlib.util import find_spec; \
	print(*[n.split(":")[1] for n in sys.argv[1:] if find_spec(n.split(":")[0]) is None])' $(NEEDED)); \
	  if [ -n "$$missing" ]; then \
	    echo "installing $$missing"; \
	    $(PY) -m pip install --quiet --retries 1 --timeout 15 $$missing \
	      || echo "could not install $$missing: what needs them will say so"; \
	  fi; \
	else \
	  echo "no torch and triton in $(PYTHON): installing the pinned ones"; \
	  $(PYTHON) -m venv $(VENV); \
	  $(PY) -m pip install --quiet -c constraints.txt -e '.[gpu,analysis,dev]'; \
	fi
	@touch $(STAMP)
