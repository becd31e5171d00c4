"""StoreAddress: what the option blob-store says, taken apart.

    s3://bucket/prefix?endpoint=https://minio.example.org&region=eu-central-1&profile=plone&sse=aws:kms&sse_key=...

Other protocols of fsspec's have a path alone: file:///srv/store, gs://bucket/prefix. There are no credentials in it:
where somebody has put some, no message repeats them.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, urlsplit

from relstore.errors import ConfigurationError

_S3 = 's3', 's3a'


@dataclass(frozen=True)
class StoreAddress:
    """path: bucket and prefix, as fsspec has them. The others are '' where they are not given.

    endpoint: the URL of a server that is not Amazon's. profile: in the files of credentials. sse, sse_key: how the
    server is to encrypt what it stores, and with which key of its own.
    """
    protocol: str
    path: str
    endpoint: str = ''
    region: str = ''
    profile: str = ''
    sse: str = ''
    sse_key: str = ''

    @property
    def is_s3(self) -> bool:
        return self.protocol in _S3

    def __str__(self) -> str:
        """The store in messages."""
        return f'{self.protocol}://{self.path}' + (f' at {self.endpoint}' if self.endpoint else '')


def parse(url: str) -> StoreAddress:
    """Return the parts of a URL. ConfigurationError: it is none for blobs."""
    try:
        parts = urlsplit(url)
        given = parse_qsl(parts.query, keep_blank_values=True)
    except ValueError:
        raise ConfigurationError('blob-store is no URL: allowed is, say, s3://bucket/prefix.') from None
    if '@' in parts.netloc:
        raise ConfigurationError('blob-store has credentials in it, which would be seen by many: leave them to the '
                                 'environment or to a profile.')
    protocol, path = parts.scheme.lower(), f'{parts.netloc}{parts.path}'.rstrip('/')
    if not protocol or not path.strip('/'):
        raise ConfigurationError('blob-store is no URL: allowed is, say, s3://bucket/prefix.')
    known = [field.name for field in fields(StoreAddress)][2:] if protocol in _S3 else []
    for name, _ in given:
        if name not in known:       # it may be anything: the value is not repeated
            raise ConfigurationError(f'blob-store has a parameter that {protocol} URLs do not have here: allowed is '
                                     f'{", ".join(known) or "none"}; credentials are left to the environment or to '
                                     'a profile.')
    options = dict(given)
    if len(options) < len(given) or not all(options.values()):
        raise ConfigurationError('blob-store has a parameter twice, or one that is empty.')
    endpoint = options.get('endpoint', '')
    if endpoint and (urlsplit(endpoint).scheme not in ('http', 'https') or '@' in endpoint):
        raise ConfigurationError('The endpoint in blob-store is no URL of a server: allowed is, say, '
                                 'https://minio.example.org:9000, without credentials.')
    if options.get('sse_key') and not options.get('sse'):
        raise ConfigurationError('blob-store has sse_key without sse: name the way of encryption, say sse=aws:kms.')
    return StoreAddress(protocol, path, **options)
