"""Files of blobs: what is done with one, wherever it lies.

A file that is open is one that somebody has locked (flock): what removes files leaves it alone. A file that was used
is one whose time of access is not zero.
"""
import errno
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol, TypeVar

from relstore.errors import ConfigurationError, StorageError

# What somebody has to mend, before another try can succeed.
RIGHTS = errno.EACCES, errno.EPERM, errno.EROFS
# Reading for all that may read the directory, and writing for nobody: as ZODB keeps what is committed.
READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH



class Open(Protocol):
    """What opens a file returns."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


File = TypeVar('File', bound=Open)


def explanation(what: str, error: OSError) -> StorageError:
    """Return what to raise for what the system refuses: ConfigurationError if it is for want of rights.

    what: could not be done; the reason is added.
    """
    kind = ConfigurationError if error.errno in RIGHTS else StorageError
    return kind(f'{what}: {error.strerror or error}.')


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise what the system refuses as an explanation."""
    try:
        yield
    except OSError as e:
        raise explanation(what, e) from e


def size_of(path: str) -> int | None:
    """Return the bytes of a file, or None if there is none."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def move(source: str, target: str) -> None:
    """Rename, or copy from another file system. If that fails the source stays, and there is no target."""
    try:
        os.replace(source, target)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        try:
            shutil.copyfile(source, target)
        except BaseException:
            remove(target)
            raise
        os.unlink(source)


def remove(path: str) -> None:
    """Remove a file, if it is there."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return


def commit_mode(path: str, directory: str) -> None:
    """Give a file the mode of what is committed in a directory, before it gets there."""
    mode = stat.S_IMODE(os.stat(path).st_mode)
    os.chmod(path, mode & ~WRITE | stat.S_IMODE(os.stat(directory).st_mode) & READ)


def sync(path: str) -> None:
    """Have a file or a directory survive a power cut as it is now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def use(path: str, status: os.stat_result) -> None:
    """Say that a file was used. status: as it is."""
    if not status.st_atime_ns:
        _set_access(path, status, time.time_ns())


def forget_use(path: str, status: os.stat_result) -> None:
    """Say that a file was not used any more."""
    _set_access(path, status, 0)


def _set_access(path: str, status: os.stat_result, ns: int) -> None:
    with suppress(OSError):     # it is another user's, or gone
        os.utime(path, ns=(ns, status.st_mtime_ns))


def lock_open(path: str, opener: Callable[[str], File]) -> File | None:
    """Open a file for reading, and keep it locked until it is closed; None if there is none."""
    try:
        file = opener(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH)       # who removes it keeps it locked for as long as that takes
        status = os.fstat(file.fileno())
        if status.st_nlink:
            use(path, status)
            return file
    except BaseException:
        file.close()
        raise
    file.close()            # it was removed between the two
    return None


def remove_if_closed(path: str) -> bool:
    """Remove a file unless somebody has it open, or it may not be removed. Return whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
