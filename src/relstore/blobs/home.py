"""blobs_of: which Blobs a database has, by the options."""
from collections.abc import Callable

from relstore.adapters.base import Adapter
from relstore.blobs.base import Blobs
from relstore.blobs.cache import BlobCache
from relstore.blobs.directory import SharedDirectory
from relstore.blobs.inside import BlobsInDatabase
from relstore.blobs.shared import BlobsInDirectory
from relstore.blobs.without import WithoutBlobs
from relstore.caching.cache import Cache
from relstore.options import Options


def blobs_of(options: Options, adapter: Adapter, cache: Cache, plain: Callable[[bytes | None], bytes | None]) -> Blobs:
    """Return the blobs of a database; plain: from a stored record to the pickle in it."""
    if options.blob_dir is None:
        return WithoutBlobs(adapter, cache, plain)
    if options.shared_blob_dir:
        return BlobsInDirectory(adapter, SharedDirectory(options.blob_dir))
    adapter.blob_chunk_bytes = options.blob_chunk_size
    return BlobsInDatabase(adapter, BlobCache(options.blob_dir, options.blob_cache_size),
                           options.blob_cache_fill_on_commit)
