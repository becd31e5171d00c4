"""Places: how a command is told which storage is meant. A configuration file, a Data.fs, or a URL.

    /etc/zope.conf              a file with <zodb_db>, <zodb> or storage sections
    /etc/zope.conf#main         the section of that name in it
    /var/site/Data.fs           a FileStorage; its blobs are in `blobstorage` or `blobs` beside it, if that is there
    sqlite:///var/site/db       the directory of an SQLite database
    postgresql://user:password@host:5432/name
    mysql://user:password@host:3306/name
    zeo://host:8100/1           a ZEO server, and the name of a storage in it
    file:///var/site/Data.fs

A URL may end with options as a configuration file has them: ?keep-history=false&blob-dir=/var/site/blobs
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlencode, urlsplit

from relstore.cli import databases
from relstore.converting.filestorage import is_filestorage
from relstore.errors import ConfigurationError

# Keys of the section of an adapter; all others are those of the storage around it.
POSTGRESQL_KEYS = ('driver', 'schema', 'prepared-statements', 'group-commit')
MYSQL_KEYS = ('driver', 'charset', 'compress', 'connect-timeout', 'read-default-file', 'read-default-group',
              'ssl-mode', 'ssl-ca', 'ssl-cert', 'ssl-key', 'unix-socket')
# What libpq reads from a URL by itself.
LIBPQ_KEYS = ('host', 'port', 'user', 'application_name', 'connect_timeout', 'sslmode', 'sslrootcert', 'sslcert',
              'sslkey', 'options', 'target_session_attrs', 'passfile', 'service')
HELP = ('a file with <relstore> or <zodb_db> sections, such as zope.conf, or FILE#NAME for one of them; a URL, such as '
        'postgresql://user@host/name; or a Data.fs')
HIDDEN = 'PASSWORD'     # stands for one that is not shown
BLOBS_BESIDE = 'blobstorage', 'blobs'

Options = dict[str, str]


def find(where: str) -> list[databases.Named]:
    """Return the storages that are meant, not opened. ConfigurationError, OSError: it cannot be told which."""
    if '://' in where:
        return databases.read_text(section(where), where.partition('?')[0].rpartition('@')[2])
    path, _, name = where.partition('#')
    if os.path.exists(where) or not name:
        path, name = where, ''
    if is_filestorage(path):
        if name:
            raise ConfigurationError(f'{path} is a single storage, and none has the name {name}.')
        return databases.read_text(_filestorage(path, {}), path)
    found = databases.read(path)
    if name:
        found = [named for named in found if named.name == name]
        if not found:
            raise ConfigurationError(f'{path} has no storage {name}.')
    return found


def find_one(where: str) -> databases.Named:
    """Return the storage that is meant. ConfigurationError: there are several."""
    found = find(where)
    if len(found) > 1:
        names = ', '.join(f'{where}#{named.name}' for named in found if named.name)
        raise ConfigurationError(f'{where} names {len(found)} storages: say which one'
                                 f'{f", as in {names}" if names else ""}.')
    return found[0]


def find_two(source: str, destination: str | None) -> tuple[databases.Named, databases.Named]:
    """Return the two storages that are meant; if `destination` is None, a file names both."""
    if destination is not None:
        return find_one(source), find_one(destination)
    found = {named.name: named for named in find(source)}
    if not found.keys() >= {'source', 'destination'}:
        raise ConfigurationError(f'{source} names no two storages `source` and `destination`: name the '
                                 'destination on the command line.')
    return found['source'], found['destination']


def section(url: str, secret: bool = False) -> str:
    """Return the section of a configuration file for a URL. ConfigurationError: it cannot be understood.

    secret: whether it is to be shown, so without the password.
    """
    try:
        parts = urlsplit(url)
        make = _SCHEMES[parts.scheme]
        if make in (_mysql, _zeo) and parts.port == 0:
            raise ValueError
    except KeyError:
        raise ConfigurationError(f'{parts.scheme}:// is not known; use one of {", ".join(sorted(_SCHEMES))}.') from None
    except ValueError:      # it may tell a part of a password
        raise _broken(url) from None
    first, _, _ = parts.query.partition('=')
    if parts.fragment or parts.netloc.count('@') > 1 or parts.netloc and '@' in parts.path + first:
        raise _broken(url)
    if secret and parts.password is not None:
        user, _, host = parts.netloc.rpartition('@')
        parts = parts._replace(netloc=f'{user.partition(":")[0]}:{HIDDEN}@{host}')
    options = {key.replace('_', '-') if key not in LIBPQ_KEYS else key: value
               # A plus is one in a path.
               for key, value in parse_qsl(parts.query.replace('+', '%2B'), keep_blank_values=True)}
    return make(parts, options)


def _broken(url: str) -> ConfigurationError:
    return ConfigurationError(f'{url.partition(":")[0]}:// is not followed by user:password@host:port/path. In each of '
                              'these the characters / ? # @ : % are written as %2F %3F %23 %40 %3A %25.')


def _relstore(adapter: str, lines: Options, options: Options) -> str:
    body = ''.join(f'    {line}\n' for line in _lines(lines))
    return (f'<relstore>\n  <{adapter}>\n{body}  </{adapter}>\n'
            + ''.join(f'  {line}\n' for line in _lines(options)) + '</relstore>\n')


def _lines(keys: Options) -> Iterable[str]:
    for key, value in keys.items():
        if '\n' in value or '\n' in key:
            raise ConfigurationError(f'{key} has more than one line.')
        yield f'{key} {value.replace("$", "$$")}'


def _postgresql(parts: SplitResult, options: Options) -> str:
    ours = {key: options.pop(key) for key in POSTGRESQL_KEYS if key in options}
    libpq = {key: options.pop(key) for key in LIBPQ_KEYS if key in options}
    # Not by urlunsplit, which leaves the slashes out where no host is named.
    dsn = f'postgresql://{parts.netloc}{parts.path}{"?" if libpq else ""}{urlencode(libpq, quote_via=quote)}'
    return _relstore('postgresql', {'dsn': dsn} | ours, options)


def _mysql(parts: SplitResult, options: Options) -> str:
    name = unquote(parts.path[1:])
    if not name or '/' in name:
        raise ConfigurationError('A MySQL URL ends with the name of a database: mysql://user:password@host/name')
    lines = {'db': name, 'host': parts.hostname, 'port': parts.port, 'user': parts.username, 'passwd': parts.password}
    keys = {key: unquote(str(value)) for key, value in lines.items() if value is not None}
    keys |= {key.replace('-', '_'): options.pop(key) for key in MYSQL_KEYS if key in options}
    return _relstore('mysql', keys, options)


def _sqlite(parts: SplitResult, options: Options) -> str:
    return _relstore('sqlite3', {'data-dir': _path(parts)}, options)


def _file(parts: SplitResult, options: Options) -> str:
    return _filestorage(_path(parts), options)


def _filestorage(path: str, options: Options) -> str:
    if 'blob-dir' not in options:
        beside = (os.path.join(os.path.dirname(os.path.abspath(path)), name) for name in BLOBS_BESIDE)
        found = next(filter(os.path.isdir, beside), None)
        options = options if found is None else options | {'blob-dir': found}
    lines = _lines({'path': path} | options)
    return '<filestorage>\n' + ''.join(f'  {line}\n' for line in lines) + '</filestorage>\n'


def _zeo(parts: SplitResult, options: Options) -> str:
    if parts.netloc:
        if parts.port is None:
            raise ConfigurationError('A ZEO URL needs a port: zeo://localhost:8100')
        host = f'[{parts.hostname}]' if ':' in (parts.hostname or '') else parts.hostname
        lines = {'server': f'{host}:{parts.port}', 'storage': unquote(parts.path.strip('/')) or '1'}
    else:
        lines = {'server': unquote(parts.path)}     # a socket
    return '<zeoclient>\n' + ''.join(f'  {line}\n' for line in _lines(lines | options)) + '</zeoclient>\n'


def url_of(path: str) -> str:
    """Return the URL of a Data.fs."""
    return f'file://{quote(path)}'


def _path(parts: SplitResult) -> str:
    if parts.netloc or not parts.path:
        raise ConfigurationError(f'A URL with a path has three slashes: {parts.scheme}:///path/to/it')
    return unquote(parts.path)


_SCHEMES = {'postgresql': _postgresql, 'postgres': _postgresql, 'mysql': _mysql, 'mariadb': _mysql, 'sqlite': _sqlite,
            'file': _file, 'zeo': _zeo}
