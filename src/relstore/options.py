"""The options of a storage: their names, defaults, allowed values and help.

This module is the only list. component.xml repeats it for ZConfig, and test_config compares the two.
Names are written with underscores in Python and with dashes in a configuration file.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from relstore.errors import ConfigurationError

logger = logging.getLogger('relstore')

#: Another name that RelStorage gave to an option of ours.
ALIASES = {'cache_delta_size_limit': 'poll_limit'}

_LATER = 'is not available yet in this version; '

#: Options of RelStorage 1.1.2 and 4.3 that are accepted and do nothing here: name -> what follows the name in
#: the sentence that is logged.
WITHOUT_EFFECT = {
    'blob_cache_size_check': 'has no effect: the blob cache never grows beyond blob-cache-size.',
    'blob_cache_size_check_external': 'has no effect: the blob cache never grows beyond blob-cache-size.',
    'replica_timeout': _LATER + 'no session goes to a replica that it could leave.',
    'revert_when_stale': _LATER + 'no session goes to a replica that could be stale.',
    'pack_commit_busy_delay': 'has no effect: a pack holds the commit lock for no longer than its last look takes.',
    'cache_local_dir_count': 'has no effect: all processes share one file in cache-local-dir.',
    'cache_local_dir_read_count': 'has no effect: all processes share one file in cache-local-dir.',
    'cache_local_dir_compress': 'has no effect: states are saved in cache-local-dir as they are.',
    'cache_local_compression': _LATER + 'states are cached as they are stored.',
    'cache_local_storage': 'has no effect: there is one kind of local cache, and cache-local-mb is its size.',
    'commit_lock_id': 'has no effect: no supported database needs a number for the commit lock.',
}

#: Options of RelStorage that a site may rely on, so that ignoring them would do harm.
REFUSED = {
    'replica_conf': _LATER + 'every session goes to the database that the adapter section names: leave it out.',
    'ro_replica_conf': _LATER + 'read-only sessions too go to the database that the adapter section names: leave it '
                                'out.',
}


@dataclass(frozen=True)
class Allowed:
    """The values an option may have, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


FLAG = Allowed('true or false', lambda value: isinstance(value, bool))
BYTES = Allowed('a whole number, 0 or more', lambda value: value is None or type(value) is int and value >= 0)
TEXT = Allowed('a text', lambda value: value is None or isinstance(value, str))
# Servers count a timeout in milliseconds, in 32 bits; to some of them 0 means waiting for ever.
SECONDS = Allowed('seconds, more than 0 and at most 86400',
                  lambda value: type(value) in (int, float) and 0 < value <= 86400)
PART = Allowed('a number, 0 or more', lambda value: type(value) in (int, float) and 0 <= value < math.inf)
# 0 turns something off.
SECONDS_OR_0 = Allowed('seconds, 0 or more and at most 86400',
                       lambda value: type(value) in (int, float) and 0 <= value <= 86400)
# It becomes part of keys in memcached, which have at most 250 characters.
PREFIX = Allowed('up to 100 printable ASCII characters without blanks',
                 lambda value: isinstance(value, str) and re.fullmatch('[!-~]{0,100}', value) is not None)


def _from(least: int) -> Allowed:
    """Allow whole numbers from `least` up."""
    return Allowed(f'a whole number, {least} or more', lambda value: type(value) is int and value >= least)


def _option(default: Any, allowed: Allowed, help: str, shown: bool = True) -> Any:
    return field(default=default, metadata={'allowed': allowed, 'help': help}, repr=shown)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a storage. Immutable; a value that is not allowed raises ConfigurationError."""

    name: str | None = _option(None, TEXT, 'Name of the storage in logs and error messages.')
    read_only: bool = _option(False, FLAG, 'Refuse every write.')
    keep_history: bool = _option(
        True, FLAG, 'Keep old revisions of objects, for undo and history. '
                    'It must be what the database was made with.')
    create_schema: bool = _option(
        True, FLAG, 'Create missing tables at open. If false, missing tables are an error.')
    commit_lock_timeout: float = _option(
        30, SECONDS, 'Seconds that the vote of a commit waits for each lock before it gives up.')
    cache_local_mb: int = _option(
        64, _from(0), 'Megabytes of memory for the cache that all connections of a process share. '
                      '0 turns it off.')
    cache_local_object_max: int = _option(
        1 << 20, _from(0), 'Bytes of the largest object state that the cache keeps.')
    cache_local_dir: str | None = _option(
        None, TEXT, 'Directory of a file in which the cache is saved at close and every few minutes, so that the '
                    'next process starts with it. One file for each database, for all processes of the machine. '
                    'It holds the states of objects: who can read it reads them, and who can write it can run code '
                    'in the site. If it is not given, nothing is saved.')
    cache_local_dir_write_max_size: int | None = _option(
        None, BYTES, 'Approximate maximum size of this file in bytes. If it is not given, the size in cache-local-mb.')
    cache_servers: str | None = _option(
        None, TEXT, 'Memcached servers that the processes of a site share, as host:port or unix:/path, with '
                    'blanks or commas between. All processes have to name the same servers in the same order.')
    cache_module_name: str | None = _option(
        None, TEXT, 'The Python module that speaks to memcached, pymemcache or pylibmc. If it is not given, the first '
                    "of these that is installed; likewise if it is RelStorage's name for pylibmc, because an answer "
                    "that is not memcached's can crash pylibmc, and the process with it.")
    cache_prefix: str = _option(
        '', PREFIX, 'What the keys in memcached begin with. A copy of a database that shares the memcached '
                    'needs another one than the original.')
    blob_dir: str | None = _option(
        None, TEXT, 'Directory for the files of blobs. Blobs are in the database, and this is a cache of them that the '
                    'processes of a machine share; with shared-blob-dir they are here and nowhere else. Without it '
                    'there are no blobs.')
    shared_blob_dir: bool = _option(
        False, FLAG, 'Whether the blobs are in blob-dir, which all processes of a site then have to share, instead of '
                     'in the database.')
    blob_cache_size: int | None = _option(
        None, BYTES, 'Maximum size in bytes of the files in blob-dir, if it is a cache. If it is not given, all that '
                     'are read stay.')
    blob_cache_fill_on_commit: bool = _option(
        False, FLAG, 'Whether the blobs that a process commits are cached in blob-dir at once, or only when they are '
                     'read.')
    blob_chunk_size: int = _option(
        1 << 20, _from(1), 'Bytes of the pieces in which a blob is stored on MySQL, MariaDB and SQLite.')
    blob_store: str | None = _option(
        None, TEXT, 'URL of an object storage that has the blobs instead of the database, such as s3://bucket/prefix; '
                    'blob-dir is a cache of it then. It has no credentials in it: they are left to the environment, to '
                    'the files of botocore, or to a profile there, ?profile=name.', shown=False)
    blob_store_grace: float = _option(
        86400, PART, 'Seconds for which the data of a blob stays in the object storage after a pack has found that '
                     'nothing needs it any more. Backups of the database that are no older can be restored.')
    pool_size: int = _option(64, _from(2), 'Database sessions that a process may hold.')
    pool_timeout: float = _option(
        30, SECONDS, 'Seconds to wait for a database session when all of them are in use.')
    poll_limit: int = _option(
        100_000, _from(1), 'Changed objects that one poll lists; with history, on PostgreSQL and SQLite, '
                           'changes of objects. When there are more, connections drop what they hold and the cache '
                           'starts empty. RelStorage calls it cache-delta-size-limit.')
    poll_interval: float = _option(
        0, SECONDS_OR_0, 'Seconds for which a process does not ask the database what changed, as long as memcached '
                         'says that nothing was committed. 0, or no cache-servers, means to ask in every transaction.')
    pack_gc: bool = _option(
        True, FLAG, 'Whether a pack removes objects that nothing refers to, or only old revisions.')
    pack_dry_run: bool = _option(
        False, FLAG, 'Whether a pack removes nothing, and only reports what it would.')
    pack_prepack_only: bool = _option(
        False, FLAG, 'Whether a pack only finds what can be removed, and records it in the database.')
    pack_skip_prepack: bool = _option(
        False, FLAG, 'Whether a pack only removes what one with pack-prepack-only has recorded.')
    pack_batch_timeout: float = _option(
        1.0, SECONDS_OR_0, 'Seconds that one step of a pack may take, at most. It aims at a tenth of a second, and '
                           'at a hundredth where others commit. 0 makes small steps.')
    pack_duty_cycle: float = _option(
        0.5, PART, 'The share of its time that a pack works; it rests for the remainder, if others commit. 1 or more, '
                   'or 0, means never to rest.')
    pack_max_delay: float = _option(
        20.0, SECONDS_OR_0, 'Seconds that a pack rests between two steps, at most.')

    def __post_init__(self) -> None:
        for option in fields(self):
            value, allowed = getattr(self, option.name), option.metadata['allowed']
            if not allowed.test(value):
                raise ConfigurationError(f'{dashed(option.name)} is {value!r}: allowed is {allowed.words}.')

    @classmethod
    def make(cls, /, **given: Any) -> Options:
        """Return the options given by keyword, ours or RelStorage's.

        Logs a warning for each option that does nothing here. An unknown keyword, or a value that is not
        allowed, raises ConfigurationError.
        """
        return cls._make(given, warn=True)

    @classmethod
    def from_section(cls, section: object, warn: bool = True) -> Options:
        """Return the options set as attributes of a ZConfig section; None means not set.

        Otherwise like `make`. Nothing is logged if `warn` is False.
        """
        values = {name: getattr(section, name, None) for name in known_names()}
        return cls._make({name: value for name, value in values.items() if value is not None}, warn)

    @classmethod
    def _make(cls, given: Mapping[str, Any], warn: bool) -> Options:
        known = known_names()
        for name in given:
            if name not in known:
                raise ConfigurationError(
                    f'There is no option {name!r}; the nearest known name is {nearest(name, known)!r}.')
        for alias, name in ALIASES.items():
            if alias in given and name in given:
                raise ConfigurationError(
                    f'{dashed(alias)} and {dashed(name)} are two names of one option: give only one of them.')
        for name, value in given.items():
            if value is not None and name in REFUSED:
                raise ConfigurationError(f'{dashed(name)} {REFUSED[name]}')
            if warn and value is not None and name in WITHOUT_EFFECT:
                logger.warning('%s %s', dashed(name), WITHOUT_EFFECT[name])
        honoured = {name: value for name, value in given.items() if name not in REFUSED | WITHOUT_EFFECT}
        options = cls(**{ALIASES.get(name, name): value for name, value in honoured.items()})
        if warn and options.poll_interval and not options.cache_servers:
            logger.warning('poll-interval has no effect without cache-servers: every transaction asks the '
                           'database what changed.')
        return options


def known_names() -> list[str]:
    """Return the name of every option that is accepted, ours and RelStorage's."""
    return [option.name for option in fields(Options)] + [*ALIASES, *WITHOUT_EFFECT, *REFUSED]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like `name`."""
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]


def dashed(name: str) -> str:
    """Return an option's name as a configuration file spells it."""
    return name.replace('_', '-')
