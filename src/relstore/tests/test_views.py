"""A view shows whatever was committed up to its newest transaction: what it lacks no later poll will ask for.

MariaDB makes a view by looking at the open transactions one after the other, while others commit: it may show a
transaction, and lack another that was committed before. That takes microseconds, so it is hardly ever met; among many
transactions that are prepared and left (XA) it takes milliseconds.
"""
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from unittest import TestCase
from unittest.mock import patch

from ZODB.utils import u64

from relstore.adapters.base import MAX_TID, Adapter
from relstore.sessions.session import Session
from relstore.tests.support.backends import (
    MySQLdbHistoryFree,
    MySQLdbHistoryPreserving,
    MySQLdbOnMySQLHistoryFree,
    MySQLdbOnMySQLHistoryPreserving,
    Psycopg2HistoryFree,
    Psycopg2HistoryPreserving,
    cases,
)
from relstore.tests.support.crowded import Crowded
from relstore.tests.support.objects import Client
from relstore.tests.support.places import Place, place_of
from relstore.tests.support.records import record

SECONDS = float(os.environ.get('RELSTORE_VIEWS_SECONDS', 2))
WRITERS, PATIENCE = 4, 60
ENOUGH = 20         # answers, and transactions in them, without which little is shown

FORKED = multiprocessing.get_context('forkserver')
FORKED.set_forkserver_preload([__name__])


def write(place: Place, ready, over, results) -> None:
    tids = []
    with closing(place.open()) as storage:
        client = Client(storage)
        ready.wait(PATIENCE)
        while not over.is_set():
            tids.append(u64(client.finish(client.vote((storage.new_oid(), record())))))
        client.view.release()
    results.put(tids)


def poll(adapter: Adapter, session: Session, since: int) -> tuple[int, list[int]]:
    """Return the newest tid, and those of what was changed since the one before."""
    _, last, _, _, changes = adapter.poll(session, since, 100_000)
    return last, [tid for _, tid in changes]


def snapshot(adapter: Adapter, session: Session, since: int) -> tuple[int, list[int]]:
    """As a pack prepares."""
    last = adapter.begin_snapshot(session)
    return last, [row[1] for page in adapter.revisions(session, False) for row in page if row[1] > since]


def changes(adapter: Adapter, session: Session, since: int) -> tuple[int, list[int]]:
    """As a pack catches up."""
    tids = [row[1] for row in adapter.changes(session, since, MAX_TID, 100_000)]
    return max(tids, default=since), tids


class Views(TestCase):
    """Processes commit one new object each time, and threads look: each transaction is in just one of their answers."""

    def test_nothing_is_missed(self):
        place = place_of(self)
        with closing(place.open()):     # there are tables now
            told: dict[Callable, list[tuple[int, list[int]]]] = {poll: [], snapshot: [], changes: []}
            results, ready, over = FORKED.Queue(), FORKED.Barrier(WRITERS + len(told)), FORKED.Event()
            writers = [FORKED.Process(target=write, args=(place, ready, over, results)) for _ in range(WRITERS)]
            readers = [threading.Thread(target=self._look, args=(place, ask, some, ready))
                       for ask, some in told.items()]
            for worker in writers + readers:
                worker.start()
            try:
                for reader in readers:
                    reader.join()
                over.set()
                committed = [tid for _ in writers for tid in results.get(timeout=PATIENCE)]
            finally:
                over.set()
                for writer in writers:
                    writer.join(PATIENCE)
        for ask, answers in told.items():
            first, last = answers[0][0], answers[-1][0]
            seen = [tid for _, tids in answers for tid in tids]
            with self.subTest(ask=ask.__name__):
                self.assertEqual(sorted(seen), sorted(tid for tid in committed if first < tid <= last))
                self.assertGreater(min(len(answers), len(seen)), ENOUGH)

    def _look(self, place: Place, ask: Callable, answers: list, ready) -> None:
        with closing(place.open()) as storage:
            adapter = storage.database.adapter
            with closing(adapter.connect()) as session:
                answers.append((adapter.last_tid(session), []))
                ready.wait(PATIENCE)
                began, seen = time.monotonic(), 0
                while (passed := time.monotonic() - began) < SECONDS or (
                        min(len(answers), seen) <= ENOUGH and passed < PATIENCE):
                    last, tids = ask(adapter, session, answers[-1][0])
                    answers.append((last, tids))
                    seen += len(tids)
                    session.rollback()


class CrowdedViews(Crowded, Views):
    pass


class Committed(TestCase):
    """Something is committed just when a view is made, on MariaDB."""

    def setUp(self):
        super().setUp()
        self.storage = self.open_storage()
        self.addCleanup(self.storage.close)
        self.adapter = self.storage.database.adapter
        self.session = self.adapter.connect()
        self.addCleanup(self.session.close)
        self.client = Client(self.storage)
        self.addCleanup(lambda: self.client.view.release())

    def commit(self) -> int:
        return u64(self.client.finish(self.client.vote((self.storage.new_oid(), record()))))

    def asked(self, ask) -> tuple[object, int, int]:
        """Return what `ask` says if there is a commit after its first statement, how often it asked, and the tid."""
        results, tids = Session.results, []

        def interrupted(session: Session, sql: str, parameters=()):
            tids.append(0)
            if len(tids) > 1:
                return results(session, sql, parameters)
            first, rest = sql.split(';\n', 1)
            rows = results(session, first)
            with patch.object(Session, 'results', results):
                tids[0] = self.commit()
            return rows + results(session, rest, parameters)

        with patch.object(Session, 'results', interrupted):
            answer = ask()
        self.session.rollback()
        return answer, len(tids), tids[0]

    def test_a_poll_asks_again(self):
        since = self.commit()
        (_, last, _, _, changes), asked, tid = self.asked(lambda: self.adapter.poll(self.session, since, 10))
        self.assertEqual((last, [tid for _, tid in changes], asked), (tid, [tid], 2))

    def test_a_pack_looks_again(self):
        self.commit()
        last, asked, tid = self.asked(lambda: self.adapter.begin_snapshot(self.session))
        self.assertEqual((last, asked), (tid, 2))

    def test_a_pack_leaves_it_for_the_next_time(self):
        """What it reads of changes is what was committed before it began to."""
        since, tids = self.commit(), [self.commit(), self.commit()]
        last_tid = self.adapter.last_tid

        def interrupted(session):
            newest = last_tid(session)
            tids.append(self.commit())
            return newest

        with patch.object(self.adapter, 'last_tid', interrupted):
            page = self.adapter.changes(self.session, since, 0, 10)
        self.assertEqual(len(tids), 3)
        # The object of `since` itself comes after oid 0.
        self.assertEqual([row[1] for row in page if row[1] > since], tids[:2])
        page = self.adapter.changes(self.session, page[-1][1], page[-1][0], 10)
        self.assertEqual([row[1] for row in page], tids[2:])


MARIADB = MySQLdbHistoryPreserving, MySQLdbHistoryFree
MYSQL = MySQLdbOnMySQLHistoryPreserving, MySQLdbOnMySQLHistoryFree
cases(globals(), Views, backends=(Psycopg2HistoryPreserving, Psycopg2HistoryFree))
cases(globals(), CrowdedViews, backends=MARIADB, thorough=MYSQL)
cases(globals(), Committed, backends=MARIADB)
del Views, CrowdedViews, Committed
