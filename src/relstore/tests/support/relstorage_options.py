"""The options of RelStorage, and those of them that are honoured."""
from dataclasses import fields

from relstore.options import ALIASES, Options

#: What RelStorage 4.3 and 1.1.2 take in a configuration file, each with a value that is not our default.
RELSTORAGE_OPTIONS = {
    'name': 'site',
    'read-only': 'true',
    'blob-dir': 'var/blobs',
    'shared-blob-dir': 'true',
    'blob-cache-size': '10gb',
    'blob-cache-size-check': '20',
    'blob-cache-size-check-external': 'true',
    'blob-chunk-size': '2mb',
    'keep-history': 'false',
    'replica-conf': 'etc/replicas.conf',
    'ro-replica-conf': 'etc/ro-replicas.conf',
    'replica-timeout': '60',
    'revert_when_stale': 'true',
    'revert-when-stale': 'true',
    'poll-interval': '60',
    'pack-gc': 'false',
    'pack-prepack-only': 'true',
    'pack-skip-prepack': 'true',
    'pack-batch-timeout': '5',
    'pack-commit-busy-delay': '2',
    'pack-dry-run': 'true',
    'pack-duty-cycle': '0.75',
    'pack-max-delay': '10',
    'cache-servers': '127.0.0.1:11211',
    'cache-module-name': 'memcache',
    'cache-prefix': 'site',
    'cache-local-mb': '500',
    'cache-local-storage': 'relstorage.cache.LRU',
    'cache-local-dir': 'var/cache',
    'cache-local-dir-count': '3',
    'cache-local-dir-read-count': '2',
    'cache-local-dir-compress': 'true',
    'cache-local-dir-write-max-size': '10mb',
    'cache-local-object-max': '64kb',
    'cache-local-compression': 'zlib',
    'cache-delta-size-limit': '50000',
    'commit-lock-timeout': '10',
    'commit-lock-id': '7',
    'create-schema': 'false',
}
HONOURED = {option.name for option in fields(Options)} | set(ALIASES)
