"""Real faults of a database, at the statement that a test names: see test_faults."""
from dataclasses import replace

from relstore.sessions.driver import Driver
from relstore.tests.support.watch import MySQLWatch, Watch


class PostgreSQLTrouble:
    """How to do harm to a connection of psycopg2 or psycopg."""

    def __init__(self, dsn: str):
        self._watch = Watch(dsn)

    def kill(self, connection) -> None:
        self._watch.terminate(connection.info.backend_pid)

    def refuse(self, connection) -> None:
        """Let the server answer with an error, as if it was the answer to the statement."""
        connection.cursor().execute("DO $$ BEGIN RAISE EXCEPTION 'by the test' USING ERRCODE = '40001'; END $$")

    def refuse_connection(self, module, *arguments) -> None:
        module.connect(host='/nonexistent', dbname='none')

    def settled(self) -> None:
        self._watch.until_nothing_is_open()

    def close(self) -> None:
        self._watch.close()


class MySQLTrouble:
    """How to do harm to a connection of mysqlclient or PyMySQL."""

    def __init__(self, watch: MySQLWatch):
        self._watch = watch

    def kill(self, connection) -> None:
        self._watch.terminate(connection.thread_id())

    def refuse(self, connection) -> None:
        """A lock timeout, after which the transaction is open still, unlike after a deadlock."""
        connection.cursor().execute("SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = 1205, MESSAGE_TEXT = 'by the test'")

    def refuse_connection(self, module, *arguments) -> None:
        module.connect(host='127.0.0.1', port=1)    # PyMySQL leaves a unix socket that is not there unclosed

    def settled(self) -> None:
        self._watch.until_nothing_is_open()

    def close(self) -> None:
        self._watch.close()


class SQLiteTrouble:

    def kill(self, connection) -> None:
        connection.rollback()   # a cursor that somebody still holds would keep the transaction
        connection.close()

    def refuse(self, connection) -> None:
        connection.execute('SELECT abs(-9223372036854775808)')

    def refuse_connection(self, module, *arguments) -> None:
        module.connect('file:/nonexistent/file?mode=ro', uri=True)

    def settled(self) -> None:
        """A lock that was left would be seen by the next commit."""

    def close(self) -> None:
        """Nothing was opened."""


class Faults:
    """Stands between sessions and a driver, counts what is sent, and makes the statement `at` fail in one way:

    refused     the database answers with an error instead; the connection is in order
    killed      the connection is ended before the statement is sent
    lost        the statement is executed, then the connection ended before the answer arrives
    down        from this statement on every connection is ended, and no new one is made
    """
    KINDS = 'refused', 'killed', 'lost', 'down'

    def __init__(self, trouble):
        self._trouble = trouble
        self._kind: str | None = None
        self._at = self.count = 0
        self.open: set[Connection] = set()

    def arm(self, kind: str, at: int) -> None:
        self._kind, self._at, self.count = kind, at, 0

    def disarm(self) -> bool:
        """Return whether the fault has happened."""
        self._kind = None
        return self.count >= self._at

    def driver(self, driver: Driver) -> Driver:
        """Return the driver with this in between."""
        def connect(module, *arguments):
            kind = self._next()
            if kind in ('refused', 'down'):
                self._trouble.refuse_connection(module, *arguments)
            connection = Connection(self, driver.connect(module, *arguments))
            if kind is not None:
                self._trouble.kill(connection.real)
            return connection

        def script(connection, sql, parameters):
            return self.send(connection.real, lambda: driver.script(connection.real, sql, parameters))

        def prepare(connection, scripts):
            return self.send(connection.real, lambda: driver.prepare(connection.real, scripts))

        def copy_in(connection, sql, chunks):
            return self.send(connection.real, lambda: driver.copy_in(connection.real, sql, chunks))

        return replace(driver, connect=connect, script=script, prepare=driver.prepare and prepare, copy_in=copy_in)

    def send(self, connection, work):
        kind = self._next()
        if kind == 'refused':
            self._trouble.refuse(connection)
        if kind in ('killed', 'down'):
            self._trouble.kill(connection)
        result = work()
        if kind == 'lost':
            self._trouble.kill(connection)
            connection.cursor().execute('SELECT 1')
        return result

    def _next(self) -> str | None:
        if self._kind is None:
            return None
        self.count += 1
        due = self.count == self._at or self.count > self._at and self._kind == 'down'
        return self._kind if due else None


class Connection:

    def __init__(self, faults: Faults, real):
        self.real, self._faults = real, faults
        faults.open.add(self)

    def cursor(self, **options) -> 'Cursor':
        return Cursor(self._faults, self.real, self.real.cursor(**options))

    def __getattr__(self, name: str):
        return getattr(self.real, name)

    def close(self) -> None:
        self._faults.open.discard(self)
        self.real.close()


class Cursor:

    def __init__(self, faults: Faults, connection, real):
        self._faults, self._connection, self._real = faults, connection, real

    def execute(self, sql, parameters) -> None:
        self._faults.send(self._connection, lambda: self._real.execute(sql, parameters))

    def executemany(self, sql, rows) -> None:
        self._faults.send(self._connection, lambda: self._real.executemany(sql, rows))

    def fetchall(self):
        return self._real.fetchall()

    def close(self) -> None:
        self._real.close()

    @property
    def rowcount(self) -> int:
        return self._real.rowcount
