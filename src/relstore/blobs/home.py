"""blobs_of: which Blobs a database has, by the options."""
from collections.abc import Callable

from relstore.adapters.base import Adapter
from relstore.blobs.address import parse
from relstore.blobs.base import Blobs
from relstore.blobs.cache import BlobCache
from relstore.blobs.directory import SharedDirectory
from relstore.blobs.inside import BlobsInDatabase
from relstore.blobs.shared import BlobsInDirectory
from relstore.blobs.store import ObjectStore
from relstore.blobs.stored import BlobsInStore
from relstore.blobs.without import WithoutBlobs
from relstore.caching.cache import Cache
from relstore.errors import ConfigurationError
from relstore.options import Options


def blobs_of(options: Options, adapter: Adapter, cache: Cache, plain: Callable[[bytes | None], bytes | None]) -> Blobs:
    """Return the blobs of a database; plain: from a stored record to the pickle in it."""
    if options.blob_store is not None:
        return _stored(options, adapter)
    if options.blob_dir is None:
        return WithoutBlobs(adapter, cache, plain)
    if options.shared_blob_dir:
        return BlobsInDirectory(adapter, SharedDirectory(options.blob_dir))
    adapter.blob_chunk_bytes = options.blob_chunk_size
    return BlobsInDatabase(adapter, BlobCache(options.blob_dir, options.blob_cache_size),
                           options.blob_cache_fill_on_commit)


def _stored(options: Options, adapter: Adapter) -> Blobs:
    if options.blob_dir is None:
        raise ConfigurationError('blob-store needs a directory to cache blobs: name one with blob-dir.')
    if options.shared_blob_dir:
        raise ConfigurationError('blob-store and shared-blob-dir true name two places for blobs: choose one of them.')
    return BlobsInStore(adapter, BlobCache(options.blob_dir, options.blob_cache_size),
                        options.blob_cache_fill_on_commit, ObjectStore(parse(options.blob_store or '')),
                        options.blob_store_grace)
