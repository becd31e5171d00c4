"""Databases in which nobody has made tables yet."""
from contextlib import closing

import relstore
from relstore.adapters.addresses import Address
from relstore.tests.support.backends import Backend, MySQLBackend, SQLiteBackend
from relstore.tests.support.watch import Watch


def unmade(test: Backend, name: str) -> Address:
    """Return the address of such a database, which goes at the end of a test; on PostgreSQL it is a schema."""
    if isinstance(test, SQLiteBackend):
        return test.address(name)
    if isinstance(test, MySQLBackend):
        arguments = test.layer.server.create_database(name)
        test.addCleanup(test.layer.server.drop_database, name)
        return relstore.MySQL(**arguments, driver=test.driver)
    dsn = test.dsn()
    with closing(Watch(dsn)) as watch:
        watch.rows(f'DROP SCHEMA IF EXISTS {name} CASCADE')
        watch.rows(f'CREATE SCHEMA {name}')
    test.addCleanup(_drop, dsn, name)
    return relstore.PostgreSQL(dsn, driver=test.driver, schema=name)


def _drop(dsn: str, name: str) -> None:
    with closing(Watch(dsn)) as watch:
        watch.rows(f'DROP SCHEMA {name} CASCADE')
