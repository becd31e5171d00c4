"""Many transactions on a server that are prepared and left."""
from contextlib import closing

PREPARED = 4000


class Crowded:
    """Mixed into a test: many transactions are prepared and left, while it runs."""

    def setUp(self):
        super().setUp()
        self._watch = self.new_watch()
        self.addCleanup(self._watch.close)
        self._watch.rows('CREATE TABLE IF NOT EXISTS test_prepared (n INT NOT NULL PRIMARY KEY) ENGINE=InnoDB')
        self.addCleanup(self._end_all)
        for n in range(PREPARED):
            with closing(self.new_watch()) as session:      # which can do nothing else afterwards
                for sql in (f"XA START 'test{n}'", f'INSERT INTO test_prepared VALUES ({n})', f"XA END 'test{n}'",
                            f"XA PREPARE 'test{n}'"):
                    session.rows(sql)

    def _end_all(self):
        for n in range(len(self._watch.rows('XA RECOVER'))):
            self._watch.rows(f"XA ROLLBACK 'test{n}'")
