"""The storages that a configuration file names, opened for a command.

The file has storage sections, as in ``<relstore> ... </relstore>``, or <zodb> or <zodb_db> sections with one each. A
whole zope.conf will do: of such a file nothing else is read. RelStorage's files are read as if they imported relstore;
only in one that imports relstore.beside, too, RelStorage's sections are its own.
"""
from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, Any

import ZConfig
import ZConfig.loader
from ZODB.config import BaseConfig
from ZODB.interfaces import IStorageWrapper
from ZODB.POSException import POSError

from relstore.adapters.addresses import Address
from relstore.adapters.base import Adapter
from relstore.config import StorageSection
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

_ZOPES = re.compile(r'^\s*<zodb_db\b', re.MULTILINE | re.IGNORECASE)
_BEGIN, _END = re.compile(r'\s*<zodb_db\b', re.IGNORECASE), re.compile(r'\s*</zodb_db\s*>', re.IGNORECASE)
_DIRECTIVE = re.compile(r'\s*%')
_RELSTORAGE = re.compile(r'^(\s*%import\s+)relstorage\s*$', re.MULTILINE | re.IGNORECASE)
_BESIDE = re.compile(r'^\s*%import\s+relstore\.beside\s*$', re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Opened:
    name: str                       # of its section, or its own
    storage: Any                    # as the file says, wrappers and all
    relstore: RelStore | None       # the one in it, if it is relstore's


@dataclass(frozen=True)
class Named:
    """A storage that the file names."""
    name: str                       # of its section, or ''
    factory: BaseConfig

    @contextmanager
    def open(self) -> Iterator[Opened]:
        for section in _sections(self.factory):
            section.config.cache_local_dir = None       # nothing is loaded that is worth to be saved, or to be read
            _there(section)
        with foreign(self.name or 'The storage'):
            storage = self.factory.open()
        with closing(storage):
            if hasattr(storage, 'registerDB'):
                storage.registerDB(_Plain())
            yield Opened(self.name or storage.getName(), storage, _innermost(storage))

    def adapters(self) -> Iterator[Adapter]:
        """Yield the adapter of each storage of relstore's in it; their tables are not looked at."""
        for section in _sections(self.factory):
            options = Options.from_section(section.config, warn=False)
            yield _there(section).bind(options.keep_history, options.read_only)


def _there(section: StorageSection) -> Address:
    """Return the address of a section. ConfigurationError: there is no database, and to open it would make one."""
    [factory] = section.config.adapters
    address: Address = factory.open()
    if not address.is_there():
        raise ConfigurationError(f'{address} is not there.')
    return address


@contextmanager
def foreign(name: str) -> Iterator[None]:
    """Have what others' storages raise read like our own errors: that may be anything."""
    try:
        yield
    except (POSError, OSError):
        raise
    except Exception as e:
        raise ConfigurationError(f'{name}: {type(e).__name__}: {e}') from e


class _Plain:
    """What takes the place of a ZODB.DB for storages that wrap records: it has each know the others'."""

    def transform_record_data(self, data: bytes) -> bytes:
        return data

    def untransform_record_data(self, data: bytes) -> bytes:
        return data


class _Loader(ZConfig.loader.ConfigLoader):
    """beside: are RelStorage's sections its own?"""

    def __init__(self, beside: bool):
        package = 'relstore.beside' if beside else 'relstore'
        super().__init__(ZConfig.loadSchemaFile(io.StringIO(SCHEMA.format(package=package))))
        self._beside = beside

    def createResource(self, file: IO[str], url: str) -> Any:
        text = file.read()
        if _is_configuration(url):
            if not self._beside:
                text = _RELSTORAGE.sub(r'\1relstore', text)
            if _ZOPES.search(text):
                text = '\n'.join(_of_databases(text.splitlines()))
        return super().createResource(io.StringIO(text), url)


def read(path: str) -> list[Named]:
    """Return the storages that a file names, not opened. ConfigurationError, OSError: it cannot be used."""
    try:
        with open(path, encoding='utf-8') as file:      # by ourselves, for ZConfig would tell of an URL
            beside = _BESIDE.search(file.read()) is not None
        config, _ = _Loader(beside).loadURL(path)
    except (ZConfig.ConfigurationError, ZConfig.SchemaError, UnicodeDecodeError, ValueError) as e:
        first, *rest = str(e).splitlines()
        last = rest[-1] if rest else ''     # there may be a traceback between
        raise ConfigurationError(f'{path} cannot be read: {first} {last}'.rstrip()) from e
    named = [Named(factory.name or '', factory) for factory in config.storages]
    named += [Named(database.name or '', database.config.storage) for database in config.databases]
    if not named:
        raise ConfigurationError(f'{path} names no storage; it needs a section <relstore>, or <zodb_db> with one.')
    return named


def _is_configuration(url: str | None) -> bool:
    return not (url or '').startswith('package:')


def _of_databases(lines: list[str]) -> Iterator[str]:
    """Yield the lines of <zodb_db> sections, and directives; for others empty ones, for the sake of their numbers."""
    inside = False
    for line in lines:
        inside = inside or bool(_BEGIN.match(line))
        yield line if inside or _DIRECTIVE.match(line) else ''
        inside = inside and not _END.match(line)


def _sections(section: Any) -> Iterator[StorageSection]:
    """Yield the sections of relstore's in a storage section, whatever is around them."""
    if isinstance(section, StorageSection):
        yield section
    elif isinstance(section, BaseConfig) or hasattr(section, 'config'):
        for name in section.config.getSectionAttributes():
            value = getattr(section.config, name)
            for inner in value if isinstance(value, list) else [value]:
                yield from _sections(inner)


def _innermost(storage: Any) -> RelStore | None:
    """Return the storage whose records others may only wrap, if it is relstore's."""
    while not isinstance(storage, RelStore) and IStorageWrapper.providedBy(storage):
        storage = getattr(storage, 'base', None)
    return storage if isinstance(storage, RelStore) else None
