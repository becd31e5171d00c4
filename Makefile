# make demo    a first look                make test    all tests           make lint    style and layers
#   DATA=/path/to/Data.fs                    PYTHON=python3.12, where python3 is not the one to use

PYTHON ?= python3
BUILDOUT = zc.buildout>=6,<7
LINTERS = ruff>=0.17,<0.18 import-linter>=2.16,<3

# Install a package where that is allowed; otherwise say what is missing, and fail.
apt = { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -q update; \
          DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends $(1); }; } || \
      { echo "Missing: $(1). Install it as root: apt-get install $(1)"; false; }
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test lint style layers servers clean
.DELETE_ON_ERROR:

demo: .venv/demo
	.venv/bin/relstore demo $(if $(DATA),--data '$(DATA)')

test: bin/test servers
	bin/test $(TESTS)

lint: style layers

style: .venv/lint
	.venv/bin/ruff check setup.py src

layers: .venv/lint
	PYTHONPATH=src .venv/bin/lint-imports

clean:
	rm -rf .venv bin parts eggs develop-eggs .installed.cfg build dist src/*.egg-info

# Without pip's own module Debian's and Ubuntu's python3 cannot make an environment.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "relstore needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call apt,$(notdir $(PYTHON))-venv)
	$(PYTHON) -m venv --clear .venv
	touch $@

.venv/demo: .venv/made setup.py
	$(PIP) --editable '.[demo]'
	touch $@

.venv/lint: .venv/made Makefile
	$(PIP) $(foreach linter,$(LINTERS),'$(linter)')
	touch $@

.venv/buildout-made: .venv/made Makefile
	$(PIP) '$(BUILDOUT)'
	touch $@

bin/test: .venv/buildout-made buildout.cfg setup.py
	.venv/bin/buildout
	touch $@

# Their absence does not stop the run: the tests say what they skip, or fail where CI=true.
servers:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || \
	    $(call apt,postgresql) || true
