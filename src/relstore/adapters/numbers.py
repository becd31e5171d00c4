"""Numbers that SQL and Python have in common, by the names that they have in both."""

# Where references are not known, states up to this size are read for them, many at a time.
SMALL_STATE_BYTES = 20_000

# What goes of an object in a pack's list, relstore_garbage: all of it, older revisions, all of it in a later pack, and
# nothing. Of OBJECT and OLDER the first revision that stays is after tid + goes - 1.
OBJECT, OLDER, LATER, SPARED = 2, 1, 0, -1

# In relstore_digest, what an object is: one that may be used, one to which nothing refers as a pack has found, and one
# that is being removed.
OBJECT_USED, OBJECT_IDLE, OBJECT_GOES = range(3)

# Keys of advisory locks on PostgreSQL, besides oids. What stands in the place of an oid where a lock is told of that is
# no single object's; SOME_OBJECTS is no lock: it is not known whose. COMMIT_LOCK and PACK_LOCK are RelStorage's, too.
COMMIT_LOCK, SOME_OBJECTS, EVERYBODY = -1, -2, -3
PACK_LOCK, SCHEMA_LOCK, OIDS_LOCK = -2, -4, -5

# Conflicts that are resolved at once: vote returns the states of the first so many, the others are asked for in turn.
TOGETHER = 100

MACROS = {name: str(number) for name, number in {
    'small_state_bytes': SMALL_STATE_BYTES,
    'goes_object': OBJECT, 'goes_older': OLDER, 'goes_later': LATER, 'goes_spared': SPARED,
    'object_used': OBJECT_USED, 'object_idle': OBJECT_IDLE, 'object_goes': OBJECT_GOES,
    'commit_lock': COMMIT_LOCK, 'everybody': EVERYBODY, 'pack_lock': PACK_LOCK, 'schema_lock': SCHEMA_LOCK,
    'oids_lock': OIDS_LOCK, 'together': TOGETHER}.items()}
