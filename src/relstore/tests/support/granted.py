"""The databases that a suite runs on as a user who has just the GRANTs that are told: to run a site, or to pack too.

Another role has made the tables, with the GRANTs for that, and the administrator empties them. Mix these into a test
case, as those of backends.py.
"""
from contextlib import closing

from psycopg2.extensions import make_dsn

import relstore
from relstore.adapters.mysql_server import Server
from relstore.adapters.rights import CREATE, PACK, PURPOSES, READ, RUN, Rights
from relstore.tests.support.backends import MySQLdbHistoryFree, Psycopg2HistoryPreserving
from relstore.tests.support.own import OwnMariaDBLayer, administrator
from relstore.tests.support.servers import PostgreSQLServer, SharedServer, postgresql_programs, require_postgresql

OWNER, RUNS, PACKS = 'granted_owner', 'granted_runs', 'granted_packs'
# Roles are made there.
OwnPostgreSQLLayer = SharedServer('OwnPostgreSQLLayer', __name__,
                                  lambda: PostgreSQLServer() if postgresql_programs() else None, require_postgresql)
GRANTED = {RUNS: (READ, RUN), PACKS: (READ, RUN, PACK)}


def statements(grants: str, *purposes: str) -> list[str]:
    """Return the statements for these purposes, of a text of GRANTs."""
    parts = dict(zip((CREATE, *PURPOSES), grants.split('\n\n'), strict=True))
    lines = [line for purpose in purposes for line in parts[purpose].splitlines() if not line.startswith('--')]
    return [statement for statement in '\n'.join(lines).split(';') if statement.strip()]


class Granted:
    user = RUNS

    def open_storage(self, name='main', **options):
        return super().open_storage(name, create_schema=False, **options)

    def _grant(self, run, address, rights: Rights, database: str, quoted: str) -> None:
        """Make the roles and the tables. address: the owner's. quoted: how the server writes a role."""
        roles = [quoted % role for role in (OWNER, *GRANTED)]
        grants = [rights.grants(database, role, roles[0]) for role in roles[1:]]
        for statement in statements(grants[0], CREATE):
            run(statement)
        with address.bind(self.keep_history).completion() as completion:
            while completion.run_next():
                pass
        for text, purposes in zip(grants, GRANTED.values(), strict=True):
            for statement in statements(text, *purposes):
                run(statement)


class GrantedPostgreSQL(Granted, Psycopg2HistoryPreserving):
    layer = OwnPostgreSQLLayer

    def address(self, name='main', **options):
        return relstore.PostgreSQL(make_dsn(self.dsn(name), user=self.user), driver=self.driver, **options)

    def follow_clock(self, adapter):
        super().follow_clock(adapter)
        with closing(self.new_watch()) as watch:
            watch.rows(f'GRANT USAGE ON SCHEMA clock TO {self.user}')       # which is this test's own

    def _create(self, database):
        super()._create(database)
        dsn = self.layer.server.dsn(database)
        with administrator(dsn) as run:
            for role in (OWNER, *GRANTED):
                if not run(f"SELECT 1 FROM pg_roles WHERE rolname = '{role}'"):
                    run(f'CREATE ROLE {role} LOGIN')
            run(f'REVOKE ALL ON DATABASE {database} FROM public')
            run(f'GRANT CONNECT ON DATABASE {database} TO {OWNER}, {", ".join(GRANTED)}')
            run('REVOKE ALL ON SCHEMA public FROM public')
            address = relstore.PostgreSQL(make_dsn(dsn, user=OWNER), driver=self.driver)
            self._grant(run, address, address.unseen(self.keep_history).rights, database, '%s')
            run('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM public')


class GrantedMariaDB(Granted, MySQLdbHistoryFree):
    layer = OwnMariaDBLayer

    def address(self, name='main', **options):
        return relstore.MySQL(**self.arguments(name) | {'user': self.user}, driver=self.driver, **options)

    def _create(self, database):
        super()._create(database)
        server = self.layer.server
        for role in (OWNER, *GRANTED):
            server.run(f"CREATE USER IF NOT EXISTS {role}@'%'")
        address = relstore.MySQL(**server.arguments(database) | {'user': OWNER}, driver=self.driver)
        adapter = address.unseen(self.keep_history, server=Server('MariaDB'))
        self._grant(server.run, address, adapter.rights, database, "%s@'%%'")


class GrantedPostgreSQLPacking(GrantedPostgreSQL):
    user = PACKS


class GrantedMariaDBPacking(GrantedMariaDB):
    user = PACKS


RUNNING = GrantedPostgreSQL, GrantedMariaDB
RUNNING_AND_PACKING = GrantedPostgreSQLPacking, GrantedMariaDBPacking
