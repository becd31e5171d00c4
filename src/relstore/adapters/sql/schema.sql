-- The tables, RelStorage's first: a database that RelStorage made is used as it is. Left out are the foreign keys of
-- object_state and current_object, with the index on prev_tid that served them: on PostgreSQL to check them took more
-- than half of the time of a large commit, and each row is written by one statement of relstore's that can't break them.
-- A section is run when the relation that it names is missing.
--   {id} {bytes} {bool} {no} {md5} {digest} {text}: the database's types

-- name: commit_row_lock
CREATE TABLE {commit_row_lock} (tid {id} NOT NULL PRIMARY KEY);
INSERT INTO {commit_row_lock} (tid) VALUES (0);

-- name: transaction [hp]
CREATE TABLE {transaction} (
    tid         {id} NOT NULL PRIMARY KEY,
    packed      {bool} DEFAULT {no} NOT NULL,
    is_empty    {bool} DEFAULT {no} NOT NULL,
    username    {bytes} NOT NULL,
    description {bytes} NOT NULL,
    extension   {bytes}
);
INSERT INTO {transaction} (tid, username, description)
VALUES (0, CAST('system' AS {bytes}), CAST('special transaction for object creation' AS {bytes}));

-- name: object_state [hp]
CREATE TABLE {object_state} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL CHECK (tid > 0),
    prev_tid    {id} NOT NULL,
    md5         {md5},
    state_size  {id} NOT NULL CHECK (state_size >= 0),
    state       {bytes},
    refs        {bytes},
    data_tid    {id},
    CONSTRAINT object_state_pk PRIMARY KEY (zoid, tid)
);
CREATE INDEX object_state_tid ON {object_state} (tid, zoid);

-- name: object_state [hf]
CREATE TABLE {object_state} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL CHECK (tid > 0),
    state_size  {id} NOT NULL CHECK (state_size >= 0),
    state       {bytes},
    refs        {bytes},
    refs_tid    {id}
);
CREATE INDEX object_state_tid ON {object_state} (tid, zoid);

-- name: current_object [hp]
CREATE TABLE {current_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL
);
CREATE INDEX current_object_tid ON {current_object} (tid);

-- name: current_object_state [hp]
CREATE VIEW {current_object_state} AS
    SELECT zoid, tid, state FROM {object_state} JOIN {current_object} USING (zoid, tid);

-- name: blob_chunk [hp]
CREATE TABLE {blob_chunk} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    chunk       {chunk} NOT NULL,
    CONSTRAINT blob_chunk_pk PRIMARY KEY (zoid, tid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid, tid) REFERENCES {object_state} (zoid, tid) ON DELETE CASCADE
);
CREATE INDEX blob_chunk_lookup ON {blob_chunk} (zoid, tid);

-- name: blob_chunk [hf]
CREATE TABLE {blob_chunk} (
    zoid        {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    tid         {id} NOT NULL,
    chunk       {chunk} NOT NULL,
    CONSTRAINT blob_chunk_pk PRIMARY KEY (zoid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid) REFERENCES {object_state} (zoid) ON DELETE CASCADE
);
CREATE INDEX blob_chunk_lookup ON {blob_chunk} (zoid);

-- What the data of each blob is, wherever that lies. RelStorage knows nothing of it, so a blob may have no row here; or,
-- where rows are replaced, one of an earlier tid, which says nothing.
-- name: relstore_blob [hp]
CREATE TABLE {relstore_blob} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL,
    CONSTRAINT relstore_blob_pk PRIMARY KEY (zoid, tid),
    CONSTRAINT relstore_blob_fk FOREIGN KEY (zoid, tid) REFERENCES {object_state} (zoid, tid) ON DELETE CASCADE
);
CREATE INDEX relstore_blob_digest ON {relstore_blob} (digest);

-- name: relstore_blob [hf]
CREATE TABLE {relstore_blob} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL,
    CONSTRAINT relstore_blob_pk PRIMARY KEY (zoid),
    CONSTRAINT relstore_blob_fk FOREIGN KEY (zoid) REFERENCES {object_state} (zoid) ON DELETE CASCADE
);
CREATE INDEX relstore_blob_digest ON {relstore_blob} (digest);

-- The objects of an object storage that has the blobs: see objects.py. wanted: seconds since 1970; wisher: who wanted it
-- last.
-- name: relstore_digest
CREATE TABLE {relstore_digest} (
    digest      {digest} NOT NULL PRIMARY KEY,
    version     {text} NOT NULL,
    size        {id} NOT NULL,
    wanted      {id} NOT NULL,
    wisher      {text} NOT NULL,
    state       {id} NOT NULL
);

-- name: object_ref [hp]
CREATE TABLE {object_ref} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    to_zoid     {id} NOT NULL,
    PRIMARY KEY (tid, zoid, to_zoid)
);

-- name: object_ref [hf]
CREATE TABLE {object_ref} (
    zoid        {id} NOT NULL,
    to_zoid     {id} NOT NULL,
    tid         {id} NOT NULL,
    PRIMARY KEY (zoid, to_zoid)
);

-- name: object_refs_added [hp]
CREATE TABLE {object_refs_added} (tid {id} NOT NULL PRIMARY KEY);

-- name: object_refs_added [hf]
CREATE TABLE {object_refs_added} (zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL);

-- name: pack_object
CREATE TABLE {pack_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    keep        {bool} NOT NULL,
    keep_tid    {id} NOT NULL,
    visited     {bool} DEFAULT {no} NOT NULL
);
CREATE INDEX pack_object_keep_false ON {pack_object} (zoid) WHERE keep = {no};
CREATE INDEX pack_object_keep_true ON {pack_object} (visited) WHERE keep <> {no};

-- name: pack_state [hp]
CREATE TABLE {pack_state} (tid {id} NOT NULL, zoid {id} NOT NULL, PRIMARY KEY (tid, zoid));

-- name: pack_state_tid [hp]
CREATE TABLE {pack_state_tid} (tid {id} NOT NULL PRIMARY KEY);

-- name: relstore_meta
CREATE TABLE {relstore_meta} (name {text} NOT NULL PRIMARY KEY, value {text} NOT NULL);

-- name: relstore_epoch
CREATE {unlogged} TABLE {relstore_epoch} (one {id} NOT NULL PRIMARY KEY CHECK (one = 1), value {text} NOT NULL);

-- References of rows that another program has written, or an older relstore: found out later, and again if they are lost.
-- Where rows are replaced they count only for the tid.
-- name: relstore_refs [hp]
CREATE {unlogged} TABLE {relstore_refs} (zoid {id} NOT NULL, tid {id} NOT NULL, refs {bytes} NOT NULL, PRIMARY KEY (zoid, tid));

-- name: relstore_refs [hf]
CREATE {unlogged} TABLE {relstore_refs} (zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL, refs {bytes} NOT NULL);

-- Each pack: up to which transaction, from which state of the database, with garbage collection or without, and how far
-- it came: see Pack. objects: how many go; number: of its sweep, when that has ended.
-- name: relstore_pack
CREATE TABLE {relstore_pack} (
    pack_id     {id} NOT NULL PRIMARY KEY,
    pack_tid    {id} NOT NULL,
    marked_tid  {id} NOT NULL,
    gc          {bool} NOT NULL,
    progress    {text} NOT NULL,
    token       {text} NOT NULL,
    objects     {id} NOT NULL,
    number      {id} NOT NULL
);

-- What a pack has found. goes, by the names of numbers.py: OBJECT (2), the object, which had this tid; OLDER (1), its
-- revisions before this tid; LATER (0), nothing yet; SPARED (-1), nothing, because it was linked or changed meanwhile. since: when it was first found unreachable, where no history tells;
-- 0: now. A negative pack_id: this object, which goes 0 in the list of that, was linked or changed since; see marks.py.
-- name: relstore_garbage
CREATE TABLE {relstore_garbage} (
    pack_id     {id} NOT NULL,
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    since       {id} NOT NULL,
    goes        {id} NOT NULL,
    PRIMARY KEY (pack_id, zoid)
);

-- One row. number: how many sweeps have ended; sweeping: the pack_id of what is being swept, or 0; packed_to: transactions
-- up to here cannot be undone; deleted: connections of before this tid may hold what a collector outside has deleted.
-- name: relstore_sweep
CREATE TABLE {relstore_sweep} (
    one         {id} NOT NULL PRIMARY KEY CHECK (one = 1),
    number      {id} NOT NULL,
    sweeping    {id} NOT NULL,
    packed_to   {id} NOT NULL,
    deleted     {id} NOT NULL
);
INSERT INTO {relstore_sweep} (one, number, sweeping, packed_to, deleted) VALUES (1, 0, 0, 0, 0);

-- Columns that a database made by RelStorage does not have.
-- name: refs [hp]
ALTER TABLE {object_state} ADD COLUMN refs {bytes};
ALTER TABLE {object_state} ADD COLUMN data_tid {id};

-- name: refs [hf]
ALTER TABLE {object_state} ADD COLUMN refs {bytes};
ALTER TABLE {object_state} ADD COLUMN refs_tid {id};
