"""Connections that end while they are in use."""
from contextlib import closing

from relstore.sessions.session import Session
from relstore.tests.support.backends import Backend, MySQLBackend, PostgreSQLBackend


def end(test: Backend, session: Session) -> None:
    """End the connection of a session, at the other end where there is one."""
    if isinstance(test, PostgreSQLBackend):
        connection = session.backend_pid
    elif isinstance(test, MySQLBackend):
        [[connection]] = session.all('SELECT CONNECTION_ID()')
    else:
        session.close()
        return
    with closing(test.new_watch()) as watch:
        watch.terminate(connection)
