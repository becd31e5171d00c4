# make demo    a first look                make test    all tests           make lint    style, types, layers
#   DATA=/path/to/Data.fs                    JOBS=3                 PYTHON=python3.12, where python3 is not the one to use
#                                            RELSTORE_TEST_THOROUGH=1, for a night
# make unit    tests without server, process or database, in seconds        make slowest    the thirty that take longest
#   TESTS="-t EveryByte -t Stress" with that: a commit cut after each of its bytes, by each driver; each server stressed
#   for a minute by 16 processes. A quarter of an hour
#   TESTS="-m test_pack_storm" with RELSTORE_PACK_SECONDS=600: links move while packs run, ten minutes on each database
# make mysql   MySQL 9.7, which Debian has no package of: into var/mysql-9.7, for the tests that then run there too
# make jars    H2 and a parser of Oracle's SQL, from Maven Central: into var/jars, for the tests of what is for Oracle
# make bench   relstore beside its peers, with charts, in var/benchmarks
#   ONLY="commit page"   some parts of: speed roundtrips reading commit occupancy page blobs convert pack memory shootout
#   QUICK=1              small sizes, under two minutes      OUT=docs/benchmarks   another place for the page
# make soak    readers and writers for hours, while servers restart and are killed: is all well, and flat? In var/soak
#   MINUTES=60 ADAPTER="postgresql mariadb mysql sqlite" SEED=1 OUT=docs/soak
#   MEMCACHED=1          with a memcached between the processes, which falls over too
# make crash   PostgreSQL is killed again and again under load: is all there, and nothing else?   MINUTES=10 SEED=1

PYTHON ?= python3
# Layers of tests that run at a time, each with servers of its own. With 1 a debugger can be used, and dots are shown.
JOBS ?= 3
BUILDOUT = zc.buildout>=6,<7
LINTERS = ruff>=0.17,<0.18 import-linter>=2.16,<3 mypy>=2.4,<3

# Install a package where that is allowed; otherwise say what is missing, and fail.
apt = { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { apt-get -q update; \
          DEBIAN_FRONTEND=noninteractive apt-get -qy install --no-install-recommends $(1); }; } || \
      { echo "Missing: $(1). Install it as root: apt-get install $(1)"; false; }

# What mysqlclient is compiled with: its makers publish no wheels for Linux. And whether that would succeed.
COMPILED_WITH = gcc libc6-dev pkg-config libmariadb-dev
include = $$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')
headers = test -e "$(include)/Python.h" || echo $(notdir $(PYTHON))-dev
compiles = { printf '\043include <Python.h>\n\043include <mysql.h>\n' | cc -E -x c -I"$(include)" \
               $$(pkg-config --cflags libmariadb || pkg-config --cflags mysqlclient) -; } >/dev/null 2>&1
PIP = .venv/bin/python -m pip install --quiet --disable-pip-version-check

# What relstore is measured beside, as its makers publish it.
PEERS = RelStorage==4.3.0 ZEO zodbshootout==0.8.* pyperf==1.7.1 psycopg2-binary psycopg[binary] PyMySQL \
        pymemcache

.PHONY: demo test unit slowest bench bench-zodbshootout soak crash lint style types layers servers jars mysql compiler clean FORCE
.DELETE_ON_ERROR:

demo: .venv/demo
	.venv/bin/relstore demo $(if $(DATA),--data '$(DATA)') $(if $(BLOBS),--blobs '$(BLOBS)')

test: bin/test servers jars
	bin/test -j $(JOBS) $(if $(RELSTORE_TEST_THOROUGH),-a 5) $(TESTS)

unit: bin/test
	bin/test --layer UnitTests $(TESTS)

# As make test, which tells them at its end; here they go into the page.
slowest: bin/test servers
	RELSTORE_TEST_SLOWEST=docs/internals/testing.md bin/test -j $(JOBS) $(TESTS)

bench: .venv-bench/made servers compiler
	.venv-bench/bin/python -m benchmarks.run $(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick) $(if $(OUT),--out '$(OUT)')

bench-zodbshootout:
	$(MAKE) bench ONLY=shootout

soak: .venv-bench/made servers
	.venv-bench/bin/python -m relstore.tests.soak --adapter $(or $(ADAPTER),all) --minutes $(or $(MINUTES),10) \
	    $(if $(SEED),--seed $(SEED)) $(if $(MEMCACHED),--memcached) $(if $(OUT),--out '$(OUT)')

crash: .venv-bench/made servers
	.venv-bench/bin/python -m relstore.tests.crash --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

lint: style types layers

style: .venv/lint
	.venv/bin/ruff check setup.py src benchmarks

# What relstore stands on is not looked at: it has no types, and need not be installed.
types: .venv/lint
	.venv/bin/mypy

layers: .venv/lint
	PYTHONPATH=src .venv/bin/lint-imports

clean:
	rm -rf .venv .venv-bench bin parts eggs develop-eggs .installed.cfg build dist src/*.egg-info

# Without pip's own module Debian's and Ubuntu's python3 cannot make an environment.
.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "relstore needs Python 3.10 or newer; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(call apt,$(notdir $(PYTHON))-venv)
	$(PYTHON) -m venv --clear .venv
	touch $@

# An environment of its own: what the peers need must not meet what the tests need.
.venv-bench/made: .venv/made .venv/compiled setup.py Makefile
	$(PYTHON) -m venv --clear .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
	    $(foreach package,$(PEERS),'$(package)') $$(sed 's/relstore.mysql./mysqlclient/' .venv/compiled)
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

bin/test: .venv/buildout-made .venv/compiled buildout.cfg setup.py
	.venv/bin/buildout compiled:eggs="$$(cat .venv/compiled)"
	touch $@

# Which drivers can be compiled here. Its absence does not stop the run either: the tests say what they skip.
.venv/compiled: .venv/made FORCE
	@$(compiles) || $(call apt,$(COMPILED_WITH) $$($(headers))) || true
	@eggs=$$(if $(compiles); then echo 'relstore[mysql]'; fi); echo "$$eggs" | cmp -s - $@ || echo "$$eggs" > $@

# Their absence does not stop the run: the tests say what they skip, or fail where CI=true.
servers:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || \
	    $(call apt,postgresql) || true
	@PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null || $(call apt,pgbouncer) || true
	@PATH="$$PATH:/usr/sbin" command -v mariadbd >/dev/null || $(call apt,mariadb-server) || true
	@command -v memcached >/dev/null || $(call apt,memcached) || true

# Their absence does not stop the run either.
jars:
	@{ command -v java >/dev/null && command -v mvn >/dev/null; } || $(call apt,default-jre-headless maven) || true
	@buildbot/fetch-jars || true

mysql: var/mysql-9.7

var/mysql-9.7:
	buildbot/fetch-mysql $@

# For the library that slows a disk down. Its absence does not stop the benchmarks: they say what they leave out.
compiler:
	@command -v cc >/dev/null || $(call apt,gcc libc6-dev) || true
