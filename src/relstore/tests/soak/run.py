"""Run: one soak in one place, from empty databases to the last check."""
import collections
import multiprocessing
import os
import random
import time
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ZODB import DB

from relstore.tests.soak import world
from relstore.tests.soak.clients import SECONDS_TO_STOP, THREADS, WRITERS, Board, Plan, work
from relstore.tests.soak.places import Place

GRACE = 5               # seconds after a disturbance in which transactions that begin may still fail
SECONDS_TO_START = 60   # of a process
PAGE = os.sysconf('SC_PAGE_SIZE')
SPAWN = multiprocessing.get_context('spawn')
CLIENT = 'kill -9 of a process'


class Process:
    """A process of clients, as its parent sees it: what it has reported, also before it was replaced."""

    def __init__(self, plan: Plan, board: Board):
        self.plan, self.board = plan, board
        self.before: collections.Counter[str] = collections.Counter()   # of those that were killed
        self.failures: list[str] = []
        self.kept: int | None = None    # sessions that were not given back in the end
        self._start(plan)

    def _start(self, plan: Plan) -> None:
        self.report: dict[str, Any] = {'counts': {}, 'cache': 0, 'failures': []}
        self.pipe, theirs = SPAWN.Pipe(duplex=False)
        self.process = SPAWN.Process(target=work, args=(plan, self.board, theirs), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def counts(self) -> collections.Counter[str]:
        return self.before + collections.Counter(self.report['counts'])

    def listen(self) -> None:
        """Take the reports that have come."""
        try:
            while self.pipe.poll():
                self.report = self.pipe.recv()
                self.failures = self.report['failures']
                self.kept = self.report.get('kept')
        except (EOFError, OSError):
            if not self.board.stop.value:
                self.process.join(1)
                self.failures = [f'Process {self.plan.number} ended with status {self.process.exitcode}']

    def kill(self) -> None:
        """SIGKILL, and another one in its place."""
        self.process.kill()
        self.process.join()
        with suppress(EOFError, OSError):   # the last report was cut short
            while self.pipe.poll():
                self.report = self.pipe.recv()
        self.before = self.counts
        self.pipe.close()
        self.plan = replace(self.plan, seed=self.plan.seed + 1, again=True)
        self._start(self.plan)

    def memory(self) -> float:
        """Return the megabytes that are this process's own."""
        _, resident, shared, *_ = map(int, Path(f'/proc/{self.process.pid}/statm').read_text().split())
        return (resident - shared) * PAGE / 1e6


class Run:
    """A soak: go() makes it, and `samples` and `failures` tell how it went.

    Where there are several processes the last one is killed now and then; the others live from beginning to end, and
    their memory is looked at.  interval: seconds between two samples.  disturb: seconds between two disturbances, in
    the mean.
    """

    def __init__(self, place: Place, *, minutes: float, processes: int, seed: int, pause: float, interval: float,
                 disturb: float, options: dict[str, Any]):
        self.place, self.seconds, self.interval, self.disturb = place, 60 * minutes, interval, disturb
        self.seed, self.pause, self.options, self.number = seed, pause, options | place.options, processes
        self.chance = random.Random(seed)
        self.board = Board(len(place.sites), processes)
        self.samples: list[dict[str, Any]] = []
        self.disturbed: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []
        self.processes: list[Process] = []

    # from beginning to end

    def go(self) -> None:
        try:
            self.fill()
            self.board.calm.value = time.monotonic() + SECONDS_TO_START     # many open at once
            self.processes = [Process(self._plan(number), self.board) for number in range(self.number)]
            self._await_first_reports()
            self.board.calm.value = time.monotonic()
            self.watch()
        finally:
            self.board.stop.value = 1
            self._await_end()
        if not self.failures:
            self.check_all()

    def fill(self) -> None:
        for site in self.place.sites:
            with closing(DB(site.open(self.options))) as db, db.transaction() as connection:
                world.create(connection.root(), self.number * WRITERS, self.chance)

    def _plan(self, number: int) -> Plan:
        return Plan(number, self.place.sites, self.options, self.seed, self.pause)

    def _await_first_reports(self) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        while not all(process.counts.keys() & {'commits', 'reads'} for process in self.processes) and not self.failures:
            if time.monotonic() > deadline:
                raise TimeoutError(f'The processes do not work after {SECONDS_TO_START} s')
            self.listen(1)

    def watch(self) -> None:
        """Sample and disturb until the time is up, or something has failed."""
        self.begin = now = time.monotonic()
        self.then, self.counted, self.events = now, self.counts(), []
        next_sample, next_disturbance = now + self.interval, now + self._until_disturbed()
        while now < self.begin + self.seconds and not self.failures:
            self.listen(max(0, min(next_sample, next_disturbance) - now))
            now = time.monotonic()
            if now >= next_sample:
                self.sample()
                next_sample = time.monotonic() + self.interval
            elif now >= next_disturbance:
                if now < self.begin + self.seconds - GRACE:
                    self.disturb_once()
                next_disturbance = time.monotonic() + self._until_disturbed()

    def _until_disturbed(self) -> float:
        return self.disturb * self.chance.uniform(0.5, 1.5)

    def listen(self, seconds: float) -> None:
        """Take reports for so long."""
        wait([process.pipe for process in self.processes], min(seconds, 1))
        for process in self.processes:
            process.listen()
        self.failures = [failure for process in self.processes for failure in process.failures]

    def _await_end(self) -> None:
        deadline = time.monotonic() + 2 * SECONDS_TO_STOP
        for process in self.processes:
            while process.process.is_alive() and time.monotonic() < deadline:
                self.listen(0.2)
            if process.process.is_alive():
                self.failures.append(f'Process {process.plan.number} did not stop')
                process.process.kill()
            process.process.join()
            process.listen()
            if process.kept is None and not process.failures:
                process.failures.append(f'Process {process.plan.number} ended without a last report')
            elif process.kept:
                process.failures.append(f'Process {process.plan.number} has {process.kept} sessions lent in the end')
        self.failures += [failure for process in self.processes for failure in process.failures
                          if failure not in self.failures]

    def check_all(self) -> None:
        """Look at everything once more, in storages that were just opened."""
        unknown = {tuple(which) for process in self.processes for which in process.report['unknown']}
        for place, (site, acknowledged) in enumerate(zip(self.place.sites, self.board.acknowledged, strict=True)):
            with closing(DB(site.open(self.options))) as db, db.transaction() as connection:
                root = connection.root()
                try:
                    world.check(root, range(world.PAIRS))
                except world.Broken as e:
                    self.failures.append(f'{site.mode}, in the end: {e}')
                for number, told in enumerate(acknowledged):
                    found = root['counters'][number].value
                    if found != told and not ((place, number) in unknown and found == told + 1):
                        self.failures.append(f'{site.mode}, in the end: writer {number} was told of {told} commits, '
                                             f'there are {found}')

    # samples and disturbances

    def counts(self) -> collections.Counter[str]:
        """Return what was done and met until now, by all."""
        return sum((process.counts for process in self.processes), collections.Counter())

    def bound_of_sessions(self) -> int:
        """Return how many sessions there may be: one for each thread and site, and one for each storage."""
        return len(self.processes) * len(self.place.sites) * (THREADS + 1)

    def sample(self) -> None:
        now, counts = time.monotonic(), self.counts()
        sample: dict[str, Any] = {
            'minutes': (now - self.begin) / 60,
            'commits': (counts['commits'] - self.counted['commits']) / (now - self.then),
            'reads': (counts['reads'] - self.counted['reads']) / (now - self.then),
            'memory': [process.memory() for process in self.processes if not process.plan.again],
            'cache': max(process.report['cache'] for process in self.processes) / 1e6,
            'events': self.events,
        }
        sample |= self.place.figures([process.process.pid for process in self.processes])
        self.samples.append(sample)
        self.then, self.counted, self.events = now, counts, []

    def disturb_once(self) -> None:
        """Do something that relstore has to get over."""
        clients = [CLIENT] if self.place.may_kill_clients and self.number > 1 else []
        ways = [*self.place.disturbances, *self.place.unnoticed, *clients]
        if not ways:
            return
        way = self.chance.choice(ways)
        if way == CLIENT:
            self.processes[-1].kill()       # nobody else may notice
        elif way in self.place.unnoticed:
            self.place.unnoticed[way]()
        else:
            self.board.calm.value = float('inf')
            self.place.disturbances[way]()
            self.board.calm.value = time.monotonic() + GRACE
        self.disturbed[way] += 1
        self.events.append(way)
