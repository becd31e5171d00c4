"""CommitCounter: tells all processes of a site, through memcached, whether anything was committed."""
import secrets
import time
from contextlib import suppress
from threading import Event, Lock, Thread

from relstore.caching.memcached import Memcached, Unreachable, keys_of

# The key holds begun * BEGUN + done.  pylibmc adds less than 2**31 at a time.
BEGUN, DONE = 1 << 30, 1
# How long a key may be seen unbalanced before it is given up.
STUCK_SECONDS = 60.0
# The pause between two attempts to tell the others of a commit.
RETRY_SECONDS = 0.5


class CommitCounter:
    """Tells whether any process has committed since an earlier question, without asking the database.

    One key on one server holds how many commits have begun and how many are done.  Both only grow, so an unchanged
    value means that nothing has begun or finished meanwhile; and if both are equal, nothing was under way.  A
    remembered value must have been read before the poll that it stands for.

    Both start at one random number, so that a key that was evicted, deleted, or lost with its server never returns
    to a remembered value.  So it may be deleted at any time, by any process, for any reason: everybody then asks the
    database.  It is deleted

    * by a committer that could not report "begun" or "done", as soon as it can reach the server again: a thread
      retries until it can;
    * by any process that sees more commits done than begun: the key was lost and created again while they were under
      way;
    * by any process that has long seen it unbalanced, at every look: a committer died between begun and done, or
      begun was counted twice, and later commits cannot correct that.  If commits were only many or slow, no harm is
      done: what they add later makes more done than begun.

    The deletion is sent even to a slow server, which is otherwise left alone: the commit waits for it, and is visible
    to others when it is acknowledged. If the server fails, the thread keeps trying regardless of the pause, so that it
    learns within half a second after it works again.

    What a lost key costs: a commit then under way is no longer announced as begun, so others see it when it is done,
    like every acknowledged commit.
    """

    def __init__(self, client: Memcached, prefix: str, database: str):
        self._server = client.first
        # Independent of the epoch: a process that has seen a new one must still reach the others.
        self._key = f'{keys_of(prefix, database)}commits'
        # Since when every look has found the key unbalanced.
        self._unbalanced: float | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Start afresh in a child process: the parent pays its own debts."""
        self._debt: object | None = None        # a new object for each commit that the others could not be told of
        self._lock = Lock()                     # for the debt and its payer
        self._payer: Thread | None = None
        self._closed = Event()

    def close(self) -> None:
        """End the paying thread, and try once more to pay."""
        self._closed.set()
        with suppress(Unreachable):
            self._pay()

    def begun(self) -> bool:
        """Report that a commit is about to happen; return the token for done()."""
        try:
            self._pay()
            # If it is counted twice, everybody asks the database for a while. Not counted at all would be worse.
            if self._server.incr(self._key, BEGUN) is None and not self._create(BEGUN):
                return self._server.incr(self._key, BEGUN) is not None
            return True
        except Unreachable:
            return False

    def done(self, token: bool) -> None:
        """Report that it has happened, or failed; with the token of begun(). The commit must be visible by now."""
        try:
            # Never counted twice: that would balance another commit, still under way.
            total = self._server.incr(self._key, DONE, again=False) if token else None
            told = token and (total is None or total % BEGUN <= total // BEGUN)
        except Unreachable:
            told = False
        if not told:
            with self._lock:
                self._debt = object()
        try:
            self._pay()
        except Unreachable:
            self._pay_later()

    def value(self) -> int | None:
        """Return a number that changes with every commit; None if it is unknown, or a commit is under way."""
        try:
            self._pay()
            found = self._server.get(self._key)
            if found is None:
                return self._create(0)
            total = _number(found)
            if total // BEGUN == total % BEGUN:
                self._unbalanced = None
                return total
            if self._never_balances(total):
                self._server.delete(self._key)
                self._unbalanced = None
            return None
        except Unreachable:
            return None

    def _create(self, more: int) -> int | None:
        """Create the key and return its value; None if it exists."""
        start = 1 + secrets.randbits(29)
        value = start * BEGUN + start + more
        return value if self._server.add(self._key, b'%d' % value) else None

    def _never_balances(self, total: int) -> bool:
        begun, done = divmod(total, BEGUN)
        if done > begun:
            return True
        since, now = self._unbalanced, time.monotonic()
        if since is None:
            self._unbalanced = now
            return False
        return now - since > STUCK_SECONDS

    def _pay(self, though_failing: bool = False) -> None:
        """Delete the key if the others could not be told of a commit: that voids every value they remember."""
        debt = self._debt
        if debt is not None:
            self._server.delete(self._key, though_failing)
            with self._lock:
                if self._debt is debt:      # a new debt may be later than the deletion
                    self._debt = None

    def _pay_later(self) -> None:
        """Start a thread that pays once the server can be reached: this process may not ask again for a long time."""
        with self._lock:
            if self._debt is not None and self._payer is None and not self._closed.is_set():
                self._payer = Thread(target=self._keep_paying, name='relstore commit counter', daemon=True)
                self._payer.start()

    def _keep_paying(self) -> None:
        while not self._closed.wait(RETRY_SECONDS):
            with suppress(Unreachable):
                self._pay(though_failing=True)
            with self._lock:
                if self._debt is None:
                    self._payer = None
                    return


def _number(value: object) -> int:
    """Return the number in a value. Garbage reads as more done than begun, and so gets deleted."""
    digits = value.strip() if isinstance(value, bytes) else b''
    return int(digits) if len(digits) <= 20 and digits.isdigit() else DONE
