"""Real servers for the tests, started in a temporary directory and stopped by their own process id.

A test of a class with `layer = PostgreSQLLayer` calls `self.layer.require(self)` in its setUp, then
`self.layer.server.create_database(name)`; MariaDBLayer and MySQLLayer likewise. A test that kills or configures its
server starts its own `PostgreSQLServer`, `MariaDBServer` or `MySQLServer` instead, after `require_postgresql(self)`
and so on. PgBouncerLayer is PostgreSQLLayer with a pooler in front of it, `layer.bouncer`.

RELSTORE_TEST_POSTGRESQL, a DSN or URL, names a staging server to run the suite on, and RELSTORE_TEST_MYSQL, a URL, one
that takes MariaDB's place. The user there must be allowed to create databases; those are dropped at the end, and
nothing else is touched.
"""

from relstore.tests.support.servers.memcached import (
    GarblingProxy,
    MemcachedLayer,
    MemcachedServer,
    memcached_program,
    require_memcached,
)
from relstore.tests.support.servers.mysql import (
    DurableMariaDBLayer,
    MariaDBLayer,
    MariaDBServer,
    MySQLDatabases,
    MySQLLayer,
    MySQLServer,
    StagingMySQL,
    mariadb_programs,
    mysql_unavailable,
    require_mariadb,
    require_mysql,
)
from relstore.tests.support.servers.pgbouncer import (
    PgBouncerLayer,
    PgBouncerServer,
    pgbouncer_program,
    require_pgbouncer,
)
from relstore.tests.support.servers.postgresql import (
    DurableLayer,
    PostgreSQLLayer,
    PostgreSQLServer,
    StagingPostgreSQL,
    StandbyServer,
    postgresql_programs,
    require_postgresql,
)
from relstore.tests.support.servers.processes import (
    children_of,
    directory_open_to_all,
    free_port,
    kill_and_wait,
    open_process,
    unprivileged_user,
    wait_for_exit,
)
from relstore.tests.support.servers.server import Server, SharedServer, cannot_run

__all__ = [
    'DurableLayer', 'DurableMariaDBLayer', 'GarblingProxy', 'MariaDBLayer', 'MariaDBServer', 'MemcachedLayer',
    'MemcachedServer', 'MySQLDatabases', 'MySQLLayer', 'MySQLServer', 'PgBouncerLayer', 'PgBouncerServer',
    'PostgreSQLLayer', 'PostgreSQLServer', 'Server', 'SharedServer', 'StagingMySQL', 'StagingPostgreSQL',
    'StandbyServer', 'cannot_run', 'children_of',
    'directory_open_to_all', 'free_port', 'kill_and_wait', 'mariadb_programs', 'memcached_program',
    'mysql_unavailable', 'open_process', 'pgbouncer_program', 'postgresql_programs', 'require_mariadb',
    'require_memcached', 'require_mysql', 'require_pgbouncer', 'require_postgresql', 'unprivileged_user',
    'wait_for_exit',
]  # fmt: skip
