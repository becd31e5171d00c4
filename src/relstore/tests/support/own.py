"""Servers of our own: roles, users and settings are made there, which a staging server need not allow."""
from contextlib import closing, contextmanager

import psycopg2

from relstore.tests.support.servers import (
    MariaDBServer,
    MySQLServer,
    PostgreSQLServer,
    SharedServer,
    mariadb_programs,
    mysql_unavailable,
    postgresql_programs,
    require_mariadb,
    require_mysql,
)


class ServerLayer:
    """PostgreSQL. The role `guarded` has a password, `visitor` has none."""
    server = None

    @classmethod
    def setUp(cls):
        if postgresql_programs():
            cls.server = PostgreSQLServer()
            cls.server.start()
            rules = cls.server.directory / 'data' / 'pg_hba.conf'
            rules.write_text('local all guarded scram-sha-256\n' + rules.read_text())
            cls.server.restart()
            with administrator(cls.server.dsn()) as run:
                run("CREATE ROLE guarded LOGIN PASSWORD 'right'")
                run('CREATE ROLE visitor LOGIN')

    @classmethod
    def tearDown(cls):
        if cls.server is not None:
            cls.server.stop()
            cls.server = None


@contextmanager
def administrator(dsn):
    """Yield a function that runs a statement and returns the rows."""
    with closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True

        def run(sql):
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchall() if cursor.description else []
        yield run


OwnMariaDBLayer = SharedServer(
    'OwnMariaDBLayer', __name__, lambda: MariaDBServer() if mariadb_programs() else None, require_mariadb)
OwnMySQLLayer = SharedServer(
    'OwnMySQLLayer', __name__, lambda: None if mysql_unavailable() else MySQLServer(), require_mysql)
