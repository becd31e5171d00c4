"""CommitCounter: whether anything was committed, in memcached for all processes of a site."""
import secrets
import time
from contextlib import suppress
from threading import Event, Lock, Thread

from relstore.caching.memcached import Memcached, Unreachable, keys_of

# The key holds begun * BEGUN + done.  pylibmc adds less than 2**31 at a time.
BEGUN, DONE = 1 << 30, 1
# Seconds after which a key that is never seen balanced is given up.
STUCK = 60.0
# Seconds between two attempts to tell the others of a commit.
RETRY = 0.5


class CommitCounter:
    """Whether anything was committed, by any process, since somebody asked: so that nobody need ask the database.

    One key of one server holds how many commits have begun and how many are done.  Both only grow, so a value that
    is what it was means that nothing began and nothing was done meanwhile; and where both are equal nothing was
    under way.  Who remembers a value must have read it before the poll that it stands for.

    Both start at one random number, so that a key which was evicted, deleted, or lost with its server never returns
    to what somebody remembers.  That is why it may be deleted at any time, by anybody, for any reason: everybody
    asks the database then.  It is deleted

    * by a committer that could not say "begun" or "done", as soon as it can reach the server again: a thread tries
      until it can;
    * by whoever sees more commits done than begun: the key was lost, and began anew, while they were under way;
    * by whoever has seen it unbalanced for long, at every look: somebody died between begun and done, or begun was
      counted twice, and however many commit since, it stays so.  Where nobody died and they only were many, or slow,
      it does no harm: what they add later makes more done than begun.

    The deletion goes to a server that is slow, too, while all else leaves it alone: a commit waits for that, and is
    seen when it is acknowledged. The thread tries one that fails, whatever others do, so that it is told half a second
    after it works again.

    What a lost key costs: a commit that was under way then is not announced as begun, so it is seen when it is done,
    as every acknowledged one.
    """

    def __init__(self, client: Memcached, prefix: str, database: str):
        self._server = client.first
        # Not of the epoch: the others have to be told by whoever has seen a new one, too.
        self._key = f'{keys_of(prefix, database)}commits'
        # Since when every look has found it unbalanced.
        self._unbalanced: float | None = None
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew in a child process: the parent pays its debts itself."""
        self._debt: object | None = None        # if the others could not be told of a commit; another one for each
        self._lock = Lock()                     # for the debt and who pays it
        self._payer: Thread | None = None
        self._closed = Event()

    def close(self) -> None:
        """End the thread that tells the others what they could not be told. It may be about to."""
        self._closed.set()
        with suppress(Unreachable):
            self._pay()

    def begun(self) -> bool:
        """Say that a commit is about to happen; return the token that done() wants."""
        try:
            self._pay()
            # Counted twice, it is unbalanced for a while: everybody asks the database. Not at all would be worse.
            if self._server.incr(self._key, BEGUN) is None and not self._create(BEGUN):
                return self._server.incr(self._key, BEGUN) is not None
            return True
        except Unreachable:
            return False

    def done(self, token: bool) -> None:
        """Say that it has happened, or failed; with the token of begun(). The commit must be visible by now."""
        try:
            # Never counted twice: it would balance the commit of somebody else, who is still under way.
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
        """Return what changes with every commit; None if that is unknown, or a commit is under way."""
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
        """Create the key and return its value; None if it is there."""
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
        return now - since > STUCK

    def _pay(self, though_failing: bool = False) -> None:
        """Delete the key if the others could not be told of a commit: whatever they remember is of no use then."""
        debt = self._debt
        if debt is not None:
            self._server.delete(self._key, though_failing)
            with self._lock:
                if self._debt is debt:      # a commit that failed meanwhile may be later than the deletion
                    self._debt = None

    def _pay_later(self) -> None:
        """Have a thread pay as soon as the server can be reached: this process may not commit or look for long."""
        with self._lock:
            if self._debt is not None and self._payer is None and not self._closed.is_set():
                self._payer = Thread(target=self._keep_paying, name='relstore commit counter', daemon=True)
                self._payer.start()

    def _keep_paying(self) -> None:
        while not self._closed.wait(RETRY):
            with suppress(Unreachable):
                self._pay(though_failing=True)
            with self._lock:
                if self._debt is None:
                    self._payer = None
                    return


def _number(value: object) -> int:
    """Return the number; what is none is more done than begun, and so deleted."""
    digits = value.strip() if isinstance(value, bytes) else b''
    return int(digits) if len(digits) <= 20 and digits.isdigit() else DONE
