"""Databases: the storages that a configuration file names, opened for a command.

The file has storage sections, as in ``<relstore> ... </relstore>``, or <zodb> or <zodb_db> sections with one storage
each. A whole zope.conf will do: nothing else in it is read. A file for RelStorage is read as if it imported relstore,
unless it also imports relstore.beside: then RelStorage's sections are RelStorage's.
"""
from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeVar

import ZConfig
import ZConfig.loader
import ZODB.config
from ZODB.config import BaseConfig
from ZODB.interfaces import IStorageWrapper
from ZODB.POSException import POSError

from relstore.adapters.addresses import Address
from relstore.adapters.base import Adapter
from relstore.config import StorageSection
from relstore.converting.filestorage import LiveFileStorage
from relstore.converting.salvage import SalvagedFileStorage, Tell
from relstore.errors import ConfigurationError
from relstore.options import Options
from relstore.storage import RelStore

SCHEMA = """
<schema>
  <import package="ZODB"/>
  <import package="{package}"/>
  <!-- Zope's section for a database, as far as its storage goes. -->
  <sectiontype name="zodb_db" extends="zodb" implements="ZODB.database" datatype="ZODB.config.ZODBDatabase">
    <multikey name="mount-point" attribute="mount_points"/>
    <key name="connection-class"/>
    <key name="container-class"/>
  </sectiontype>
  <multisection type="ZODB.storage" name="*" attribute="storages"/>
  <multisection type="ZODB.database" name="*" attribute="databases"/>
</schema>
"""

BLOB_LAYOUT = '.layout'     # the file that ZODB keeps in each directory of blobs

# Sections of storages that hold something in memory.
IN_MEMORY = ZODB.config.MappingStorage, ZODB.config.DemoStorage

Section = TypeVar('Section', bound=BaseConfig)

_ZOPES = re.compile(r'^\s*<zodb_db\b', re.MULTILINE | re.IGNORECASE)
_BEGIN, _END = re.compile(r'\s*<zodb_db\b', re.IGNORECASE), re.compile(r'\s*</zodb_db\s*>', re.IGNORECASE)
_DIRECTIVE = re.compile(r'\s*%')
_RELSTORAGE = re.compile(r'^(\s*%import\s+)relstorage\s*$', re.MULTILINE | re.IGNORECASE)
_BESIDE = re.compile(r'^\s*%import\s+relstore\.beside\s*$', re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Opened:
    name: str                       # of its section, or of the storage
    storage: Any                    # as the file says, with its wrappers
    relstore: RelStore | None       # the innermost storage, if it is relstore's


@dataclass(frozen=True)
class Named:
    """A storage that the file names."""
    name: str                       # of its section, or ''
    factory: BaseConfig

    @property
    def paths(self) -> list[str]:
        """Of the files of the FileStorages in it."""
        return [str(section.config.path) for section in _sections(self.factory, ZODB.config.FileStorage)]

    @property
    def blob_directories(self) -> set[str]:
        """Those that hold the data of blobs: no cache of relstore's. Without symbolic links."""
        return {os.path.realpath(section.config.blob_dir) for section in _all_sections(self.factory)
                if getattr(section.config, 'blob_dir', None)
                and (not isinstance(section, StorageSection) or section.config.shared_blob_dir)}

    @property
    def is_shared(self) -> bool:
        """Whether other processes that open it have the same in it."""
        return not any(isinstance(section, IN_MEMORY) for section in _all_sections(self.factory))

    @property
    def is_made(self) -> bool:
        """Whether there is a database for each section of relstore's in it, with tables."""
        return all(_address(section).is_there() for section in _sections(self.factory, StorageSection)) and all(
            _has_tables(adapter) for adapter in self.adapters())

    @contextmanager
    def open(self, reading: bool = False, making: bool = False, left_out: Tell | None = None) -> Iterator[Opened]:
        """Open it, and close it in the end.

        reading: nothing is written, and of a FileStorage not even a lock. making: what is not there is made.
        left_out: with `reading`: told what cannot be read of a damaged FileStorage. By default that is an error.
        """
        for section in _sections(self.factory, StorageSection):
            section.config.cache_local_dir = None       # nothing is loaded that is worth to be saved, or to be read
            section.config.read_only = section.config.read_only or reading
            if not making:
                _there(section)
        for section in _sections(self.factory, ZODB.config.FileStorage):
            if reading:
                # An instance's: the section may be within that of a wrapper, which opens it.
                where = section.config.path, section.config.blob_dir or ''
                section.open = (partial(LiveFileStorage, *where) if left_out is None
                                else partial(SalvagedFileStorage, *where, left_out))
            else:
                _keep_blobs(section.config)
        for section in _sections(self.factory, ZODB.config.ZEOClient):
            section.config.read_only = section.config.read_only or reading
        with foreign(self.name or 'The storage'):
            storage = self.factory.open()
        with closing(storage):
            # Not relstore's own: it would take that for a wrapper, and have no record read by another process.
            if hasattr(storage, 'registerDB') and not isinstance(storage, RelStore):
                storage.registerDB(_Plain())
            yield Opened(self.name or storage.getName(), storage, _innermost(storage))

    def adapters(self) -> Iterator[Adapter]:
        """Yield the adapter of each storage of relstore's in it; their tables are not looked at."""
        for section in _sections(self.factory, StorageSection):
            options = Options.from_section(section.config, warn=False)
            yield _there(section).bind(options.keep_history, options.read_only)


def with_relstore(text: str) -> str:
    """Return a configuration in which relstore is imported in place of RelStorage, unless it names both."""
    return text if _BESIDE.search(text) else _RELSTORAGE.sub(r'\1relstore', text)


def _keep_blobs(config: Any) -> None:
    """ConfigurationError: there are blobs, but not the file of the FileStorage. To make that would remove them."""
    if config.blob_dir and (config.create or not os.path.exists(config.path)) and _holds_files(config.blob_dir):
        raise ConfigurationError(f'{config.path} would be created, but {config.blob_dir} is not empty, and the blobs '
                                 'in it would be removed: name another blob-dir.')


def _holds_files(directory: str) -> bool:
    return any(name != BLOB_LAYOUT for _, _, names in os.walk(directory) for name in names)


def _there(section: StorageSection) -> Address:
    """Return the address of a section. ConfigurationError: there is no database, and to open it would make one."""
    address = _address(section)
    if not address.is_there():
        raise ConfigurationError(f'{address} does not exist.')
    return address


def _address(section: StorageSection) -> Address:
    [factory] = section.config.adapters
    address: Address = factory.open()
    return address


def _has_tables(adapter: Adapter) -> bool:
    with adapter.completion() as completion:
        return 'object_state' in adapter.relations(completion.session)


@contextmanager
def foreign(name: str) -> Iterator[None]:
    """Turn whatever another package's storage raises into an error like relstore's own."""
    try:
        yield
    except (POSError, OSError):
        raise
    except Exception as e:
        raise ConfigurationError(f'{name}: {type(e).__name__}: {e}') from e


class _Plain:
    """Stands for a ZODB.DB. It has no cache, so there is nothing to invalidate when ZEO tells of a commit.

    Storages that wrap records learn with registerDB how the others do it.
    """

    def transform_record_data(self, data: bytes) -> bytes:
        return data

    def untransform_record_data(self, data: bytes) -> bytes:
        return data

    def invalidate(self, tid: bytes, oids: object) -> None:
        """ZEO's client fails, and does not see the commit, without this method."""

    def invalidateCache(self) -> None:
        """ZEO's client calls this when it was disconnected for long."""


class _Loader(ZConfig.loader.ConfigLoader):
    """beside: whether RelStorage's sections are RelStorage's."""

    def __init__(self, beside: bool):
        package = 'relstore.beside' if beside else 'relstore'
        super().__init__(ZConfig.loadSchemaFile(io.StringIO(SCHEMA.format(package=package))))
        self._beside = beside

    def createResource(self, file: IO[str], url: str) -> Any:
        text = file.read()
        if _is_configuration(url):
            if not self._beside:
                text = with_relstore(text)
            if _ZOPES.search(text):
                text = '\n'.join(_of_databases(text.splitlines()))
        return super().createResource(io.StringIO(text), url)


def read(path: str) -> list[Named]:
    """Return the storages that a file names, not opened. ConfigurationError, OSError: it cannot be used."""
    def load() -> Any:
        with open(path, encoding='utf-8') as file:      # by ourselves, for ZConfig would tell of an URL
            beside = _BESIDE.search(file.read()) is not None
        return _Loader(beside).loadURL(path)

    return _named(load, path)


def read_text(text: str, name: str) -> list[Named]:
    """Return the storages that a text names which is as such a file; it imports relstore. name: what to call it."""
    return _named(lambda: _Loader(False).loadFile(io.StringIO(f'%import relstore\n{text}')), name)


def _named(load: Callable[[], Any], path: str) -> list[Named]:
    try:
        config, _ = load()
    except (ZConfig.ConfigurationError, ZConfig.SchemaError, UnicodeDecodeError, ValueError) as e:
        first, *rest = str(e).splitlines()
        last = rest[-1] if rest else ''     # there may be a traceback in between
        raise ConfigurationError(f'{path} cannot be read: {first} {last}'.rstrip()) from e
    named = [Named(factory.name or '', factory) for factory in config.storages]
    named += [Named(database.name or '', database.config.storage) for database in config.databases]
    if not named:
        raise ConfigurationError(f'{path} names no storage; it needs a section <relstore>, or <zodb_db> with one.')
    return named


def _is_configuration(url: str | None) -> bool:
    return not (url or '').startswith('package:')


def _of_databases(lines: list[str]) -> Iterator[str]:
    """Yield the lines of <zodb_db> sections, and directives. Others become empty, so that line numbers stay right."""
    inside = False
    for line in lines:
        inside = inside or bool(_BEGIN.match(line))
        yield line if inside or _DIRECTIVE.match(line) else ''
        inside = inside and not _END.match(line)


def _sections(section: Any, kind: type[Section]) -> Iterator[Section]:
    """Yield the sections of a kind in a storage section, whatever is around them."""
    return (each for each in _all_sections(section) if isinstance(each, kind))


def _all_sections(section: Any) -> Iterator[Any]:
    if not hasattr(section, 'config'):
        return
    yield section
    for name in section.config.getSectionAttributes():
        value = getattr(section.config, name)
        for inner in value if isinstance(value, list) else [value]:
            yield from _all_sections(inner)


def _innermost(storage: Any) -> RelStore | None:
    """Return the storage inside of all wrappers, if it is relstore's."""
    while not isinstance(storage, RelStore) and IStorageWrapper.providedBy(storage):
        storage = getattr(storage, 'base', None)
    return storage if isinstance(storage, RelStore) else None
