"""The exceptions, each chosen by what the caller should do about it.

ZODB's own exceptions are raised wherever ZODB has one: `POSKeyError`, `ConflictError`,
`ReadConflictError`, `UndoError`, `ReadOnlyError`, `StorageTransactionError`.
"""
from transaction.interfaces import TransientError
from ZODB.POSException import ConflictError
from ZODB.POSException import StorageError as StorageError


class ConfigurationError(StorageError):
    """Somebody has to change something before this can work; the message says what, in one sentence."""


class NotAllowed(ConfigurationError):
    """The user of the database lacks a right."""


class DatabaseError(StorageError):
    """The database refused a statement, and trying again will not help; the message quotes it."""


class Missing(DatabaseError):
    """What a statement names is not there: a table, a function, a schema."""


class Unavailable(StorageError, TransientError):
    """The database could not do it now and nothing was changed: abort and try again."""


class Disconnected(Unavailable):
    """The connection to the database is gone; with it whatever was not committed."""


class LockTimeout(Unavailable):
    """Somebody else held a lock for longer than `commit-lock-timeout`.

    lock: the oid of the object it is for, or what stands for one (see adapters.base); None where it is not known.
    """
    lock: int | None = None


class OutOfLocks(Unavailable):
    """The server has no room for more locks in this moment; the message names the setting."""


class Deadlock(ConflictError):
    """The database ended this transaction, because it and another waited for each other."""


def changed_garbage(database: object) -> Unavailable:
    """Return the error of a pack that would let garbage stay, though what that refers to may be gone."""
    return Unavailable(f'Objects of {database} that were garbage were changed lately, and may refer to what an '
                       'interrupted pack has removed; nothing was removed. Commit something else, and try again.')


class DamagedBlob(StorageError):
    """The data of a blob is not what was committed: it was changed, or cut short, where it is kept.

    Nothing of it was given away. It is to be restored from a backup.
    """


class OutcomeUnknown(StorageError):
    """The commit was sent, and no server could be reached to ask whether it happened.

    Do not retry blindly: look at the database first.
    """
