-- The tables for Oracle: RelStorage's as it makes them there, and relstore's. Each statement commits by itself, so each
-- is a section, named after what it makes, and can be looked for: a table, an index, a sequence.

-- name: commit_row_lock
CREATE TABLE {commit_row_lock} (tid {id} NOT NULL PRIMARY KEY);

-- name: pack_lock
CREATE TABLE pack_lock (dummy CHAR(1));

-- name: transaction [hp]
CREATE TABLE {transaction} (
    tid         {id} NOT NULL PRIMARY KEY,
    packed      {bool} DEFAULT {no} CHECK (packed IN ('N', 'Y')),
    is_empty    {bool} DEFAULT {no} CHECK (is_empty IN ('N', 'Y')),
    username    RAW(500),
    description RAW(2000),
    extension   RAW(2000)
);

-- name: zoid_seq
CREATE SEQUENCE {zoid_seq};

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

-- name: object_state [hf]
CREATE TABLE {object_state} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL CHECK (tid > 0),
    state_size  {id} NOT NULL CHECK (state_size >= 0),
    state       {bytes},
    refs        {bytes},
    refs_tid    {id}
);

-- name: object_state_tid
CREATE INDEX object_state_tid ON {object_state} (tid);

-- name: current_object [hp]
CREATE TABLE {current_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL
);

-- name: current_object_tid [hp]
CREATE INDEX current_object_tid ON {current_object} (tid);

-- name: current_object_state [hp]
CREATE VIEW {current_object_state} AS
    SELECT s.zoid, s.tid, s.state FROM {object_state} s JOIN {current_object} c ON c.zoid = s.zoid AND c.tid = s.tid;

-- name: blob_chunk [hp]
CREATE TABLE {blob_chunk} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    chunk       {chunk},
    CONSTRAINT blob_chunk_pk PRIMARY KEY (zoid, tid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid, tid) REFERENCES {object_state} (zoid, tid) ON DELETE CASCADE
);

-- name: blob_chunk [hf]
CREATE TABLE {blob_chunk} (
    zoid        {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    tid         {id} NOT NULL,
    chunk       {chunk},
    CONSTRAINT blob_chunk_pk PRIMARY KEY (zoid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid) REFERENCES {object_state} (zoid) ON DELETE CASCADE
);

-- name: relstore_blob [hp]
CREATE TABLE {relstore_blob} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL,
    CONSTRAINT relstore_blob_pk PRIMARY KEY (zoid, tid),
    CONSTRAINT relstore_blob_fk FOREIGN KEY (zoid, tid) REFERENCES {object_state} (zoid, tid) ON DELETE CASCADE
);

-- name: relstore_blob [hf]
CREATE TABLE {relstore_blob} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL,
    CONSTRAINT relstore_blob_pk PRIMARY KEY (zoid),
    CONSTRAINT relstore_blob_fk FOREIGN KEY (zoid) REFERENCES {object_state} (zoid) ON DELETE CASCADE
);

-- name: relstore_blob_digest
CREATE INDEX relstore_blob_digest ON {relstore_blob} (digest);

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
    keep        {bool} DEFAULT {no} NOT NULL CHECK (keep IN ('N', 'Y')),
    keep_tid    {id} NOT NULL,
    visited     {bool} DEFAULT {no} NOT NULL CHECK (visited IN ('N', 'Y'))
);

-- name: pack_state [hp]
CREATE TABLE {pack_state} (tid {id} NOT NULL, zoid {id} NOT NULL, PRIMARY KEY (tid, zoid));

-- name: pack_state_tid [hp]
CREATE TABLE {pack_state_tid} (tid {id} NOT NULL PRIMARY KEY);

-- Rows that stand for objects which are being created: the oid modulo LOCKS. -1: for the counter of oids.
-- name: relstore_lock
CREATE TABLE {relstore_lock} (zoid {id} NOT NULL PRIMARY KEY);

-- For each session its last commit: `vote` is what vote called it, tid the transaction that became of it. voted: seconds
-- since 1970.
-- name: relstore_commit
CREATE TABLE {relstore_commit} (
    session_key {id} NOT NULL PRIMARY KEY,
    vote        {id} NOT NULL,
    tid         {id} NOT NULL,
    voted       {id} NOT NULL
);

-- What a transaction is going to write. Each session sees its own rows, until its transaction ends.
-- name: relstore_stage
CREATE {temporary} TABLE {relstore_stage} (
    zoid        {id} NOT NULL PRIMARY KEY,
    md5         {md5},
    state_size  {id},
    data_tid    {id},
    refs        {bytes},
    state       {bytes}
) ON COMMIT DELETE ROWS;

-- name: relstore_stage_chunk
CREATE {temporary} TABLE {relstore_stage_chunk} (
    zoid        {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    chunk       {chunk},
    PRIMARY KEY (zoid, chunk_num)
) ON COMMIT DELETE ROWS;

-- name: relstore_stage_record
CREATE {temporary} TABLE {relstore_stage_record} (
    zoid        {id} NOT NULL PRIMARY KEY,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL
) ON COMMIT DELETE ROWS;

-- For packing: see schema.sql.
-- name: relstore_refs [hp]
CREATE TABLE {relstore_refs} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    refs        {bytes} NOT NULL,
    PRIMARY KEY (zoid, tid)
);

-- name: relstore_refs [hf]
CREATE TABLE {relstore_refs} (zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL, refs {bytes} NOT NULL);

-- name: relstore_pack
CREATE TABLE {relstore_pack} (
    pack_id     {id} NOT NULL PRIMARY KEY,
    pack_tid    {id} NOT NULL,
    marked_tid  {id} NOT NULL,
    gc          NUMBER(1) NOT NULL,
    progress    {text} NOT NULL,
    token       {text} NOT NULL,
    objects     {id} NOT NULL,
    number      {id} NOT NULL
);

-- name: relstore_garbage
CREATE TABLE {relstore_garbage} (
    pack_id     {id} NOT NULL,
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    since       {id} NOT NULL,
    goes        {id} NOT NULL,
    PRIMARY KEY (pack_id, zoid)
);

-- name: relstore_sweep
CREATE TABLE {relstore_sweep} (
    one         {id} NOT NULL PRIMARY KEY CHECK (one = 1),
    number      {id} NOT NULL,
    sweeping    {id} NOT NULL,
    packed_to   {id} NOT NULL,
    deleted     {id} NOT NULL
);

-- name: relstore_epoch
CREATE TABLE {relstore_epoch} (one {id} NOT NULL PRIMARY KEY CHECK (one = 1), value {text} NOT NULL);

-- Where this is empty or missing, the database is not complete yet: first whatever rows have to be there.
-- name: relstore_meta [hp]
INSERT INTO {commit_row_lock} (tid) SELECT 0 FROM dual WHERE NOT EXISTS (SELECT 1 FROM {commit_row_lock});
INSERT INTO {transaction} (tid, username, description)
SELECT 0, HEXTORAW('73797374656D'), HEXTORAW('7370656369616C207472616E73616374696F6E20666F72206F626A656374206372656174696F6E')
FROM dual WHERE NOT EXISTS (SELECT 1 FROM {transaction} WHERE tid = 0);
INSERT INTO {relstore_lock} (zoid) SELECT n.n - 2 FROM {upto_locks} n WHERE NOT EXISTS (SELECT 1 FROM {relstore_lock});
INSERT INTO {relstore_sweep} (one, number, sweeping, packed_to, deleted)
SELECT 1, 0, 0, 0, 0 FROM dual WHERE NOT EXISTS (SELECT 1 FROM {relstore_sweep});
CREATE TABLE {relstore_meta} (name {text} NOT NULL PRIMARY KEY, value {text} NOT NULL);

-- name: relstore_meta [hf]
INSERT INTO {commit_row_lock} (tid) SELECT 0 FROM dual WHERE NOT EXISTS (SELECT 1 FROM {commit_row_lock});
INSERT INTO {relstore_lock} (zoid) SELECT n.n - 2 FROM {upto_locks} n WHERE NOT EXISTS (SELECT 1 FROM {relstore_lock});
INSERT INTO {relstore_sweep} (one, number, sweeping, packed_to, deleted)
SELECT 1, 0, 0, 0, 0 FROM dual WHERE NOT EXISTS (SELECT 1 FROM {relstore_sweep});
CREATE TABLE {relstore_meta} (name {text} NOT NULL PRIMARY KEY, value {text} NOT NULL);

-- Columns that a database made by RelStorage does not have.
-- name: refs [hp]
ALTER TABLE {object_state} ADD (refs {bytes}, data_tid {id});

-- name: refs [hf]
ALTER TABLE {object_state} ADD (refs {bytes}, refs_tid {id});
