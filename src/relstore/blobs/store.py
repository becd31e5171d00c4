"""ObjectStore: objects of an object storage, S3 or what fsspec reaches otherwise, below one prefix.

An object is there as a whole or not at all, and never changes: S3 shows an upload when it is complete. It is in
memory a few parts at a time. Each request is tried a few times, over some seconds; see ATTEMPTS.

fsspec remembers listings and file systems: here neither is. The thread in which its requests run is not there after a
fork, so a process that was forked makes a file system of its own.

Credentials come from where botocore looks for them: the environment, its files, the machine. What a server says of an
error is not repeated, for it may quote what was signed: messages name its code alone.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from relstore.blobs.address import StoreAddress
from relstore.errors import ConfigurationError, StorageError, Unavailable

Result = TypeVar('Result')

# Bytes of a part of an upload, and parts in memory at a time. S3 takes 10,000 parts of at least 5 MiB.
PART_BYTES = 8 << 20
PARTS_AT_A_TIME = 4
MOST_PARTS = 10_000
# Bytes that are read at a time.
PIECE_BYTES = 8 << 20
SMALL_BYTES = 1 << 16
# Objects that are listed at a time.
PAGE = 1000
# Times that a request is sent, and seconds that one waits for the server. An answer that is cut is asked for again.
ATTEMPTS = 4
CONNECT_SECONDS, READ_SECONDS = 10, 60

# What a server answers, as far as somebody has to mend something.
_MENDED = {
    'NoSuchBucket': 'there is no such bucket',
    'InvalidAccessKeyId': 'the server does not know the access key: set right credentials',
    'SignatureDoesNotMatch': 'the secret key is not the one that belongs to the access key: set right credentials',
    'InvalidToken': 'the session token is none: set right credentials',
    'ExpiredToken': 'the credentials have expired: set new ones',
    'RequestTimeTooSkewed': "the clock of this machine is not the server's: set it",
    'RequestExpired': "the clock of this machine is not the server's: set it",
    'AccessDenied': 'the credentials lack the right',
    'PermanentRedirect': 'the bucket is in another region: name it with ?region=',
    'AuthorizationHeaderMalformed': 'the bucket is in another region: name it with ?region=',
    'IllegalLocationConstraintException': 'the bucket is in another region: name it with ?region=',
    'NoCredentialsError': 'there are no credentials in the environment or in files',
    'PartialCredentialsError': 'the credentials are incomplete',
    'CredentialRetrievalError': 'the credentials cannot be had from where they are',
    'TokenRetrievalError': 'the credentials cannot be had from where they are',
    'ProfileNotFound': 'there is no such profile',
    'NoRegionError': 'no region is named: do so with ?region=',
    'InvalidRegionError': 'the region has no valid name',
}
# Where a server gives a number alone.
_STATUS = {401: 'AccessDenied', 403: 'AccessDenied'}
# What passes.
_PASSES = {'SlowDown', 'ServiceUnavailable', 'InternalError', 'RequestTimeout', 'OperationAborted', 'Throttling',
           'ThrottlingException', 'TooManyRequests', 'RequestLimitExceeded', 'BadDigest', 'IncompleteBody'}


class Object(NamedTuple):
    """size: in bytes. modified: seconds since 1970, by the server's clock."""
    name: str
    size: int
    modified: float


class ObjectStore:
    """The objects below an address. `name` is the name of an object there. Threads share it.

    Whatever fails is a ConfigurationError where somebody has to mend something, Unavailable where another try may
    succeed, or else a StorageError.
    """

    def __init__(self, address: StoreAddress):
        self.address = address
        self._lock, self._process = threading.Lock(), os.getpid()
        self._made: Any = None

    def __repr__(self) -> str:
        return f'<{type(self).__name__} {self.address}>'

    def put(self, name: str, path: str) -> None:
        """Store what is in a file. It is not there until it is there as a whole."""
        size = os.stat(path).st_size
        more: dict[str, Any] = {}
        if self.address.is_s3:
            more = {'chunksize': max(PART_BYTES, -(-size // MOST_PARTS)), 'max_concurrency': PARTS_AT_A_TIME,
                    'ContentType': 'application/octet-stream'}
        self._do('store an object', lambda fs: self._put(fs, path, name, more))

    def write(self, name: str, data: bytes) -> None:
        """Store a small object, in place of what is there."""
        def write(fs: Any) -> None:
            self._make_directory(fs, name)
            fs.pipe_file(self._path(name), data)
        self._do('store an object', write)

    def size(self, name: str) -> int | None:
        """Return the bytes of an object, or None if there is none."""
        def ask(fs: Any) -> int | None:
            try:
                return int(fs.info(self._path(name), **({'refresh': True} if self.address.is_s3 else {}))['size'])
            except FileNotFoundError as e:
                _absent(e)
                return None
            except OSError as e:
                if self.address.is_s3 and not _code(e)[0]:      # to this question a number is all that is answered
                    fs.cat_file(self._path(name), start=0, end=1)
                raise
        return self._do('look for an object', ask)

    def read(self, name: str, size: int) -> Iterator[bytes]:
        """Yield an object of this size in pieces. FileNotFoundError: it is not there."""
        for start in range(0, size, PIECE_BYTES):
            yield self.read_range(name, start, min(start + PIECE_BYTES, size))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`, as far as there are any. FileNotFoundError: it is not there."""
        if start >= end:
            return b''

        def ask(fs: Any) -> bytes | None:
            try:
                return bytes(fs.cat_file(self._path(name), start=start, end=end))
            except FileNotFoundError as e:
                _absent(e)
                return None
            except OSError as e:
                if _code(e) in (('InvalidRange', 416), ('', 416)):      # it ends before
                    return b''
                raise
        for attempt in range(ATTEMPTS):
            try:
                found = self._do('read an object', ask)
                break
            except Unavailable:         # cut in the middle: this is not tried again by those below
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(0.1 * 2 ** attempt)
        if found is None:
            raise FileNotFoundError(name)
        return found

    def read_small(self, name: str) -> bytes | None:
        """Return an object of a few bytes, or None if there is none."""
        try:
            return self.read_range(name, 0, SMALL_BYTES)
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        def remove(fs: Any) -> None:
            try:
                fs.rm_file(self._path(name))
            except FileNotFoundError as e:
                _absent(e)
        self._do('remove an object', remove)

    def list(self) -> Iterator[Object]:
        """Yield all objects, but for those whose names begin with a dot; also what nobody here has stored."""
        for entry in self._pages() if self.address.is_s3 else self._directories():
            found = self._object(entry)
            if not found.name.startswith('.'):
                yield found

    def _pages(self) -> Iterator[dict[str, Any]]:
        """Yield what S3 lists, page by page: fsspec would have all in memory at once."""
        bucket, _, prefix = self.address.path.partition('/')
        where: dict[str, Any] = {'Bucket': bucket, 'Prefix': f'{prefix}/' if prefix else '', 'MaxKeys': PAGE}
        while True:
            page = self._do('list the objects', lambda fs: fs.call_s3('list_objects_v2', **where))
            for entry in page.get('Contents', []):
                yield {'name': f'{bucket}/{entry["Key"]}', 'size': entry['Size'], **entry}
            if not page.get('IsTruncated'):
                return
            where['ContinuationToken'] = page['NextContinuationToken']

    def _directories(self) -> Iterator[dict[str, Any]]:
        def ask(fs: Any, directory: str) -> Iterable[dict[str, Any]]:
            try:
                return [entry for entry in fs.ls(directory, detail=True) if entry['type'] == 'file']
            except FileNotFoundError:
                return []
        for number in range(256):
            yield from self._do('list the objects', lambda fs: ask(fs, f'{self.address.path}/{number:02x}'))

    def url(self, name: str, expires: int, filename: str | None, content_type: str | None) -> str:
        """Return a URL by which anybody can read an object for so many seconds. Nothing is asked for that.

        filename: under which a browser is to save it. content_type: which the server is to tell.
        """
        if not self.address.is_s3:
            raise ConfigurationError(f'{self.address} gives no URLs: use S3, or serve blobs by the site.')
        more = {'ResponseContentDisposition': _attachment(filename)} if filename is not None else {}
        if content_type is not None:
            more['ResponseContentType'] = content_type
        return str(self._do('sign a URL', lambda fs: fs.url(self._path(name), expires=expires, **more)))

    # Inside -------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f'{self.address.path}/{name}'

    def _make_directory(self, fs: Any, name: str) -> None:
        if not self.address.is_s3:
            fs.makedirs(self._path(name).rpartition('/')[0], exist_ok=True)

    def _put(self, fs: Any, path: str, name: str, more: dict[str, Any]) -> None:
        self._make_directory(fs, name)
        if self.address.is_s3:
            fs.put_file(path, self._path(name), **more)
        else:
            part = f'{self._path(name)}.{os.urandom(8).hex()}.part'
            fs.put_file(path, part)
            fs.mv(part, self._path(name))

    def _object(self, entry: dict[str, Any]) -> Object:
        modified = entry.get('LastModified') or entry.get('mtime') or entry.get('created') or 0
        name = str(entry['name']).removeprefix('/').removeprefix(self.address.path.removeprefix('/') + '/')
        return Object(name, int(entry['size']), float(getattr(modified, 'timestamp', lambda: modified)()))

    def _do(self, what: str, act: Callable[[Any], Result]) -> Result:
        """Return act(file system), with errors of this package's in place of others."""
        try:
            return act(self._file_system())
        except StorageError:
            raise
        except Exception as e:
            error = self._error(what, e)
        raise error     # without what it was made of, which knows more than anybody should read

    def _error(self, what: str, error: Exception) -> StorageError:
        code, status = _code(error)
        text = f'{self.address} does not let us {what}'
        known = _MENDED.get(code) or _MENDED.get(_STATUS.get(status, ''))
        if known is not None:
            return ConfigurationError(f'{text}: {known} ({code or status}).')
        if code in _PASSES or status >= 500 or status == 429:
            return Unavailable(f'{text}: the server is overloaded, or has failed ({code or status}); try again.')
        if code:
            return StorageError(f'{text}: the server answers {code}.')
        if isinstance(error, OSError) and not _is_lost(error):
            return StorageError(f'{text}: {error.strerror or type(error).__name__}.')
        if _is_lost(error):
            return Unavailable(f'{text}: the server cannot be reached, or the connection was cut '
                               f'({type(error).__name__}); try again.')
        return StorageError(f'{text}: {type(error).__name__}.')

    def _file_system(self) -> Any:
        if self._process != os.getpid():        # the lock may be that of a thread that is not here
            self._process, self._lock, self._made = os.getpid(), threading.Lock(), None
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        address = self.address
        needed = 'relstore[s3]' if address.is_s3 else 'fsspec'
        try:
            import fsspec
            more = _s3_options(address) if address.is_s3 else {}
            kind = fsspec.get_filesystem_class(address.protocol)
        except (ImportError, ValueError):
            raise ConfigurationError(f'blob-store {address} needs what is not installed: pip install '
                                     f"'{needed}', or what fsspec needs for {address.protocol}.") from None
        made = kind(skip_instance_cache=True, use_listings_cache=False, **more)
        if address.is_s3:
            made.retries = 1        # botocore tries again
        return made


def _s3_options(address: StoreAddress) -> dict[str, Any]:
    """Return the arguments of s3fs.S3FileSystem."""
    config: dict[str, Any] = {
        'connect_timeout': CONNECT_SECONDS, 'read_timeout': READ_SECONDS, 'signature_version': 's3v4',
        'retries': {'mode': 'standard', 'total_max_attempts': ATTEMPTS}}
    if address.endpoint:
        # Others than Amazon's need not know bucket names in host names, nor checksums that come after the data.
        config |= {'s3': {'addressing_style': 'path'}, 'request_checksum_calculation': 'when_required',
                   'response_checksum_validation': 'when_required'}
    options: dict[str, Any] = {'config_kwargs': config, 'endpoint_url': address.endpoint}
    if address.region:
        options['client_kwargs'] = {'region_name': address.region}
    if address.profile:
        options['profile'] = address.profile
    encryption = {'ServerSideEncryption': address.sse, 'SSEKMSKeyId': address.sse_key}
    options['s3_additional_kwargs'] = {name: value for name, value in encryption.items() if value}
    return options


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _code(error: BaseException) -> tuple[str, int]:
    """Return what the server calls an error, and its number; what botocore calls it; '' and 0 where nobody does."""
    for one in _chain(error):
        response = getattr(one, 'response', None)
        if isinstance(response, dict) and 'Error' in response:
            code = str(response['Error'].get('Code', ''))
            status = int(response.get('ResponseMetadata', {}).get('HTTPStatusCode', 0))
            return ('', int(code)) if code.isdigit() else (code, status)
        if type(one).__name__ in _MENDED:
            return type(one).__name__, 0
    return '', 0


def _is_lost(error: BaseException) -> bool:
    return any(isinstance(one, (ConnectionError, TimeoutError)) or type(one).__name__ == 'FSTimeoutError'
               or type(one).__module__.startswith(('botocore', 'aiohttp')) for one in _chain(error))


def _absent(error: FileNotFoundError) -> None:
    """An object is not there. OSError: it is the bucket that is not."""
    if _code(error)[0] == 'NoSuchBucket':
        raise OSError('NoSuchBucket') from error


def _attachment(filename: str) -> str:
    """Return a Content-Disposition (RFC 6266) by which this is the name of the file, whatever is in it."""
    from urllib.parse import quote
    plain = ''.join(c if ' ' <= c <= '~' and c not in '"\\%' else '_' for c in filename)
    return f'attachment; filename="{plain}"; filename*=UTF-8\'\'{quote(filename, safe="")}'
