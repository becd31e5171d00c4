-- The tables for MySQL and MariaDB: those of schema.sql, whole, because a database of theirs has to be completed after
-- a crash at any place. Each statement of theirs commits by itself, so a table comes with its indexes, in one statement.

-- name: commit_row_lock
CREATE TABLE IF NOT EXISTS {commit_row_lock} (tid {id} NOT NULL PRIMARY KEY) ENGINE=InnoDB;

-- name: transaction [hp]
CREATE TABLE IF NOT EXISTS {transaction} (
    tid         {id} NOT NULL PRIMARY KEY,
    packed      {bool} DEFAULT {no} NOT NULL,
    is_empty    {bool} DEFAULT {no} NOT NULL,
    username    BLOB NOT NULL,
    description BLOB NOT NULL,
    extension   BLOB
) ENGINE=InnoDB;

-- InnoDB ends every index with the primary key, so one on tid finds the objects of a transaction in order.
-- name: object_state [hp]
CREATE TABLE IF NOT EXISTS {object_state} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL CHECK (tid > 0),
    prev_tid    {id} NOT NULL,
    md5         {md5},
    state_size  {id} NOT NULL CHECK (state_size >= 0),
    state       {bytes},
    refs        {bytes},
    data_tid    {id},
    PRIMARY KEY (zoid, tid),
    INDEX object_state_tid (tid)
) ENGINE=InnoDB;

-- name: object_state [hf]
CREATE TABLE IF NOT EXISTS {object_state} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL CHECK (tid > 0),
    state_size  {id} NOT NULL CHECK (state_size >= 0),
    state       {bytes},
    refs        {bytes},
    refs_tid    {id},
    INDEX object_state_tid (tid)
) ENGINE=InnoDB;

-- name: current_object [hp]
CREATE TABLE IF NOT EXISTS {current_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL,
    INDEX current_object_tid (tid)
) ENGINE=InnoDB;

-- Not OR REPLACE, which needs the right to drop tables: it is made where it is missing, by one at a time.
-- name: current_object_state [hp]
CREATE VIEW {current_object_state} AS
    SELECT zoid, tid, state FROM {object_state} JOIN {current_object} USING (zoid, tid);

-- name: blob_chunk [hp]
CREATE TABLE IF NOT EXISTS {blob_chunk} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    chunk       {chunk} NOT NULL,
    PRIMARY KEY (zoid, tid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid, tid) REFERENCES {object_state} (zoid, tid) ON DELETE CASCADE
) ENGINE=InnoDB;

-- name: blob_chunk [hf]
CREATE TABLE IF NOT EXISTS {blob_chunk} (
    zoid        {id} NOT NULL,
    chunk_num   {id} NOT NULL,
    tid         {id} NOT NULL,
    chunk       {chunk} NOT NULL,
    PRIMARY KEY (zoid, chunk_num),
    CONSTRAINT blob_chunk_fk FOREIGN KEY (zoid) REFERENCES {object_state} (zoid) ON DELETE CASCADE
) ENGINE=InnoDB;

-- name: relstore_blob [hp]
CREATE TABLE IF NOT EXISTS {relstore_blob} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL,
    PRIMARY KEY (zoid, tid),
    INDEX relstore_blob_digest (digest),
    CONSTRAINT relstore_blob_fk FOREIGN KEY (zoid, tid) REFERENCES {object_state} (zoid, tid) ON DELETE CASCADE
) ENGINE=InnoDB;

-- name: relstore_blob [hf]
CREATE TABLE IF NOT EXISTS {relstore_blob} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL,
    size        {id} NOT NULL,
    digest      {digest} NOT NULL,
    INDEX relstore_blob_digest (digest),
    CONSTRAINT relstore_blob_fk FOREIGN KEY (zoid) REFERENCES {object_state} (zoid) ON DELETE CASCADE
) ENGINE=InnoDB;

-- name: relstore_digest
CREATE TABLE IF NOT EXISTS {relstore_digest} (
    digest      {digest} NOT NULL PRIMARY KEY,
    version     {text} NOT NULL,
    size        {id} NOT NULL,
    wanted      {id} NOT NULL,
    wisher      {text} NOT NULL,
    state       {id} NOT NULL
) ENGINE=InnoDB;

-- name: object_ref [hp]
CREATE TABLE IF NOT EXISTS {object_ref} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    to_zoid     {id} NOT NULL,
    PRIMARY KEY (tid, zoid, to_zoid)
) ENGINE=InnoDB;

-- name: object_ref [hf]
CREATE TABLE IF NOT EXISTS {object_ref} (
    zoid        {id} NOT NULL,
    to_zoid     {id} NOT NULL,
    tid         {id} NOT NULL,
    PRIMARY KEY (zoid, to_zoid)
) ENGINE=InnoDB;

-- name: object_refs_added [hp]
CREATE TABLE IF NOT EXISTS {object_refs_added} (tid {id} NOT NULL PRIMARY KEY) ENGINE=InnoDB;

-- name: object_refs_added [hf]
CREATE TABLE IF NOT EXISTS {object_refs_added} (zoid {id} NOT NULL PRIMARY KEY, tid {id} NOT NULL) ENGINE=InnoDB;

-- There are no partial indexes here.
-- name: pack_object
CREATE TABLE IF NOT EXISTS {pack_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    keep        {bool} NOT NULL,
    keep_tid    {id} NOT NULL,
    visited     {bool} DEFAULT {no} NOT NULL,
    INDEX pack_object_keep_zoid (keep, zoid)
) ENGINE=InnoDB;

-- name: pack_state [hp]
CREATE TABLE IF NOT EXISTS {pack_state} (tid {id} NOT NULL, zoid {id} NOT NULL, PRIMARY KEY (tid, zoid)) ENGINE=InnoDB;

-- name: pack_state_tid [hp]
CREATE TABLE IF NOT EXISTS {pack_state_tid} (tid {id} NOT NULL PRIMARY KEY) ENGINE=InnoDB;

-- Counts blocks of oids: value n stands for the oids 16n-15 .. 16n.
-- name: new_oid
CREATE TABLE IF NOT EXISTS {new_oid} (zoid {id} NOT NULL PRIMARY KEY AUTO_INCREMENT) ENGINE=InnoDB;

-- Always empty for everyone but a transaction that creates objects whose oids may be in use; see the statement
-- lock_created.
-- name: relstore_lock
CREATE TABLE IF NOT EXISTS {relstore_lock} (zoid {id} NOT NULL PRIMARY KEY) ENGINE=InnoDB;

-- For each session its last commit: `vote` is what vote called it, tid the transaction that became of it.
-- name: relstore_commit
CREATE TABLE IF NOT EXISTS {relstore_commit} (
    session     {id} NOT NULL PRIMARY KEY,
    vote        {id} NOT NULL,
    tid         {id} NOT NULL,
    voted       DATETIME(6) NOT NULL
) ENGINE=InnoDB;

-- For packing: see schema.sql.
-- name: relstore_refs [hp]
CREATE TABLE IF NOT EXISTS {relstore_refs} (
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    refs        {bytes} NOT NULL,
    PRIMARY KEY (zoid, tid)
) ENGINE=InnoDB;

-- name: relstore_refs [hf]
CREATE TABLE IF NOT EXISTS {relstore_refs} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL,
    refs        {bytes} NOT NULL
) ENGINE=InnoDB;

-- name: relstore_pack
CREATE TABLE IF NOT EXISTS {relstore_pack} (
    pack_id     {id} NOT NULL PRIMARY KEY,
    pack_tid    {id} NOT NULL,
    marked_tid  {id} NOT NULL,
    gc          {bool} NOT NULL,
    progress    {text} NOT NULL,
    token       {text} NOT NULL,
    objects     {id} NOT NULL,
    number      {id} NOT NULL
) ENGINE=InnoDB;

-- name: relstore_garbage
CREATE TABLE IF NOT EXISTS {relstore_garbage} (
    pack_id     {id} NOT NULL,
    zoid        {id} NOT NULL,
    tid         {id} NOT NULL,
    since       {id} NOT NULL,
    goes        {id} NOT NULL,
    PRIMARY KEY (pack_id, zoid)
) ENGINE=InnoDB;

-- name: relstore_sweep
CREATE TABLE IF NOT EXISTS {relstore_sweep} (
    one         {id} NOT NULL PRIMARY KEY CHECK (one = 1),
    number      {id} NOT NULL,
    sweeping    {id} NOT NULL,
    packed_to   {id} NOT NULL,
    deleted     {id} NOT NULL
) ENGINE=InnoDB;
INSERT IGNORE INTO {relstore_sweep} (one, number, sweeping, packed_to, deleted) VALUES (1, 0, 0, 0, 0);

-- One random value. In memory, so that it is gone when the server was restarted, as commits may be.
-- name: relstore_epoch
CREATE TABLE IF NOT EXISTS {relstore_epoch} (one {id} NOT NULL PRIMARY KEY CHECK (one = 1), value {text} NOT NULL)
    ENGINE={memory};

-- Where this is empty or missing, the database is not complete yet: first whatever rows have to be there.
-- name: relstore_meta [hp]
INSERT IGNORE INTO {commit_row_lock} (tid) VALUES (0);
INSERT IGNORE INTO {transaction} (tid, username, description)
VALUES (0, 'system', 'special transaction for object creation');
CREATE TABLE IF NOT EXISTS {relstore_meta} (name {text} NOT NULL PRIMARY KEY, value {text} NOT NULL) ENGINE=InnoDB;

-- name: relstore_meta [hf]
INSERT IGNORE INTO {commit_row_lock} (tid) VALUES (0);
CREATE TABLE IF NOT EXISTS {relstore_meta} (name {text} NOT NULL PRIMARY KEY, value {text} NOT NULL) ENGINE=InnoDB;

-- Columns that a database made by RelStorage does not have.
-- name: refs [hp]
ALTER TABLE {object_state} ADD COLUMN refs {bytes}, ADD COLUMN data_tid {id}, ALGORITHM=INSTANT;

-- name: refs [hf]
ALTER TABLE {object_state} ADD COLUMN refs {bytes}, ADD COLUMN refs_tid {id}, ALGORITHM=INSTANT;
