-- What SQLite says otherwise. It has no server, so a commit is a series of plain statements.

-- Types of columns, and a value of one.
-- macro: id
INTEGER

-- macro: integer
INTEGER

-- macro: bytes
BLOB

-- macro: chunk
BLOB

-- macro: bool
INTEGER

-- macro: no
0

-- macro: md5
TEXT

-- macro: digest
BLOB

-- macro: text
TEXT

-- macro: unlogged

-- macro: oids
(SELECT value AS zoid FROM json_each($oids))

-- macro: revisions
(SELECT json_extract(value, '$[0]') AS zoid, json_extract(value, '$[1]') AS tid FROM json_each($revisions))

-- The backup API, by which a backup takes the place of what is there (.restore too), counts the schema on.
-- macro: epoch
SELECT value || '.' || (SELECT schema_version FROM pragma_schema_version) || '.' || {version} FROM {relstore_epoch}

-- The pack_id of a sweep under way; else what was deleted, the sign turned.
-- macro: sweep_told
CASE WHEN sweeping > 0 THEN sweeping ELSE -deleted END

-- Of a list, the objects that a batch of a sweep is about.
-- macro: in_batch
pack_id = $pack_id AND zoid > $oid AND zoid <= $upto_oid

-- As configured.
-- name: begin_session
{pragmas}

-- Whether SQLite itself waits for a lock: not for that of writers, see filesession.py.
-- name: be_impatient
PRAGMA busy_timeout = 0

-- name: be_patient
PRAGMA busy_timeout = {busy_timeout_ms}

-- The file is read by way of memory maps, and what is read so counts as memory of the process: not for a session that
-- reads much of it.
-- name: map_nothing
PRAGMA mmap_size = 0

-- name: use_wal
PRAGMA journal_mode = WAL

-- name: begin_read
BEGIN

-- name: begin_write
BEGIN IMMEDIATE

-- First (epoch, newest tid), then (number of the last sweep, newest tid up to the one asked about), then (oid, tid) of
-- each object that changed after that, for every time that it did: there is no index by which to find the newest alone.
-- Asked as a join, as of a server, it takes twice as long.
-- name: poll (since, most)
SELECT ({epoch}), coalesce(max(tid), 0) FROM {last}
UNION ALL SELECT number, (SELECT coalesce(max(tid), 0) FROM {last} WHERE tid <= $since) FROM {relstore_sweep}
UNION ALL SELECT * FROM (SELECT zoid, tid FROM {object_state} WHERE tid > $since LIMIT $most)

-- Likewise, of each of these objects that exists, and with what is swept or was deleted. Before them, whether the transaction that
-- a view stands on is gone.
-- name: vote (at, oids) [hp]
SELECT ({epoch}), max(tid) FROM {transaction}
UNION ALL SELECT number, {sweep_told} FROM {relstore_sweep}
UNION ALL SELECT NOT EXISTS (SELECT 1 FROM {transaction} WHERE tid = $at), packed_to FROM {relstore_sweep}
UNION ALL SELECT c.zoid, c.tid FROM {oids} o JOIN {current_object} c ON c.zoid = o.zoid

-- name: vote (at, oids) [hf]
SELECT ({epoch}), coalesce(max(tid), 0) FROM {object_state}
UNION ALL SELECT number, {sweep_told} FROM {relstore_sweep}
UNION ALL SELECT $at IS NULL, packed_to FROM {relstore_sweep}
UNION ALL SELECT c.zoid, c.tid FROM {oids} o JOIN {object_state} c ON c.zoid = o.zoid

-- name: insert_transaction (new_tid, packed, username, description, extension) [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension) VALUES
    ($new_tid, $packed, $username, $description, $extension)

-- name: insert_state (oid, new_tid, prev_tid, md5, size, state, refs, data_tid) [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
VALUES ($oid, $new_tid, $prev_tid, $md5, $size, $state, $refs, $data_tid)

-- name: point_current (oid, new_tid) [hp]
INSERT INTO {current_object} (zoid, tid) VALUES ($oid, $new_tid)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid

-- name: insert_state (oid, new_tid, size, state, refs) [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
VALUES ($oid, $new_tid, $size, $state, $refs, $new_tid)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, state_size = excluded.state_size, state = excluded.state,
    refs = excluded.refs, refs_tid = excluded.refs_tid

-- name: save_references (oid, tid, refs) [hp]
INSERT INTO {relstore_refs} (zoid, tid, refs) VALUES ($oid, $tid, $refs) ON CONFLICT (zoid, tid) DO NOTHING

-- name: save_references (oid, tid, refs) [hf]
INSERT INTO {relstore_refs} (zoid, tid, refs) VALUES ($oid, $tid, $refs)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, refs = excluded.refs

-- name: add_garbage (pack_id, oid, tid, since, goes)
INSERT INTO {relstore_garbage} (pack_id, zoid, tid, since, goes) VALUES ($pack_id, $oid, $tid, $since, $goes)

-- name: spare (oids, pack_id)
UPDATE {relstore_garbage} SET goes = {goes_spared} WHERE zoid IN (SELECT o.zoid FROM {oids} o) AND pack_id = $pack_id

-- name: forget_garbage (pack_id, keep)
DELETE FROM {relstore_garbage} WHERE rowid IN (
    SELECT g.rowid FROM {relstore_garbage} g WHERE abs(g.pack_id) NOT IN ($pack_id, $keep)
        AND abs(g.pack_id) NOT IN (SELECT sweeping FROM {relstore_sweep}) LIMIT 2000)

-- name: insert_chunk (oid, tid, number, chunk)
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk) VALUES ($oid, $tid, $number, $chunk)

-- name: remove_chunks (oid) [hf]
DELETE FROM {blob_chunk} WHERE zoid = $oid

-- name: copy_chunks (tid, oid, earlier) [hp]
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk)
SELECT zoid, $tid, chunk_num, chunk FROM {blob_chunk} WHERE zoid = $oid AND tid = $earlier

-- macro: now_seconds
CAST((julianday('now') - 2440587.5) * 86400 AS INTEGER)

-- There is one lock for all that write, and whoever votes or claims has it.
-- macro: hold


-- macro: lock_if_free


-- name: insert_record (oid, tid, size, digest)
INSERT OR REPLACE INTO {relstore_blob} (zoid, tid, size, digest) VALUES ($oid, $tid, $size, $digest)

-- name: remove_record (oid) [hf]
DELETE FROM {relstore_blob} WHERE zoid = $oid

-- name: copy_record (tid, oid, earlier) [hp]
INSERT OR REPLACE INTO {relstore_blob} (zoid, tid, size, digest)
SELECT zoid, $tid, size, digest FROM {relstore_blob} WHERE zoid = $oid AND tid = $earlier

-- Each time with the number of the last, and with what is recorded of the blob.
-- name: chunk_rows (oid, tid, number, start, size, limit)
SELECT (SELECT max(l.chunk_num) FROM {blob_chunk} l WHERE l.zoid = $oid AND l.tid = $tid),
    b.chunk_num, length(b.chunk), substr(b.chunk, CASE WHEN b.chunk_num = $number THEN $start ELSE 1 END, $size),
    r.size, r.digest
FROM {blob_chunk} b LEFT JOIN {relstore_blob} r ON r.zoid = b.zoid AND r.tid = b.tid
WHERE b.zoid = $oid AND b.tid = $tid AND b.chunk_num >= $number
ORDER BY b.chunk_num LIMIT $limit

-- Foreign keys are not enforced here, so what belongs to blobs is removed by name.
-- name: sweep_chunks (pack_id, oid, upto_oid) [hp]
DELETE FROM {blob_chunk} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes > {goes_later})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = blob_chunk.zoid AND s.tid = blob_chunk.tid)

-- name: sweep_chunks (pack_id, oid, upto_oid) [hf]
DELETE FROM {blob_chunk} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes = {goes_object})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = blob_chunk.zoid)

-- name: sweep_records (pack_id, oid, upto_oid) [hp]
DELETE FROM {relstore_blob} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes > {goes_later})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = relstore_blob.zoid AND s.tid = relstore_blob.tid)
RETURNING size

-- name: sweep_records (pack_id, oid, upto_oid) [hf]
DELETE FROM {relstore_blob} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes = {goes_object})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = relstore_blob.zoid)
RETURNING size

-- name: sweep_current (pack_id, oid, upto_oid) [hp]
DELETE FROM {current_object} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes = {goes_object})
    AND tid = (SELECT g.tid FROM {relstore_garbage} g WHERE g.pack_id = $pack_id AND g.zoid = current_object.zoid)

-- name: sweep_states (pack_id, oid, upto_oid) [hp]
DELETE FROM {object_state} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes > {goes_later})
    AND tid < (SELECT g.tid + g.goes - 1 FROM {relstore_garbage} g
               WHERE g.pack_id = $pack_id AND g.zoid = object_state.zoid
                     AND (g.goes = {goes_older} OR NOT EXISTS (SELECT 1 FROM {current_object} c WHERE c.zoid = g.zoid)))
RETURNING state_size

-- name: sweep_states (pack_id, oid, upto_oid) [hf]
DELETE FROM {object_state} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes = {goes_object})
    AND tid = (SELECT g.tid FROM {relstore_garbage} g WHERE g.pack_id = $pack_id AND g.zoid = object_state.zoid)
RETURNING state_size

-- name: sweep_references (pack_id, oid, upto_oid)
DELETE FROM {relstore_refs} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE {in_batch} AND goes > {goes_later})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = relstore_refs.zoid AND s.tid = relstore_refs.tid)

-- name: forget_transactions (tid, upto_tid, named) [hp]
DELETE FROM {transaction} WHERE tid > $tid AND tid <= $upto_tid AND tid > 0
    AND tid < (SELECT max(tid) FROM {transaction})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.tid = "transaction".tid)
    AND NOT ($named AND EXISTS (SELECT 1 FROM {object_state} s WHERE s.prev_tid = "transaction".tid))

-- Where the revision that a kept one replaced is gone: see postgresql_functions.sql.
-- name: forget_replaced (tid, upto_tid) [hp]
UPDATE {object_state} AS s SET prev_tid = 0
WHERE s.prev_tid > $tid AND s.prev_tid <= $upto_tid
    AND NOT EXISTS (SELECT 1 FROM {object_state} r WHERE r.zoid = s.zoid AND r.tid = s.prev_tid)

-- name: mark_packed (tid, upto_tid) [hp]
UPDATE {transaction} SET packed = 1 WHERE tid > $tid AND tid <= $upto_tid AND tid > 0 AND packed = 0

-- name: has_foreign_key [hp]
SELECT count(*) FROM pragma_foreign_key_list('object_state')

-- name: pragmas
SELECT name FROM pragma_pragma_list

-- Oids are counted in the main file, so that one file is a whole backup.
-- name: relations
SELECT name FROM sqlite_master WHERE type IN ('table', 'view')

-- name: columns
SELECT m.name, p.name, p.type FROM sqlite_master m JOIN pragma_table_info(m.name) p WHERE m.type IN ('table', 'view')

-- name: last_oid
SELECT value FROM {relstore_oid}

-- name: take_oids (count)
UPDATE {relstore_oid} SET value = value + $count RETURNING value

-- name: raise_oid (oid)
UPDATE {relstore_oid} SET value = max(value, $oid)

-- name: size
SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)

-- name: zap [hp]
DELETE FROM {blob_chunk};
DELETE FROM {relstore_blob};
DELETE FROM {current_object};
DELETE FROM {object_state};
DELETE FROM {transaction} WHERE tid > 0;
DELETE FROM {object_ref};
DELETE FROM {object_refs_added};
DELETE FROM {pack_object};
DELETE FROM {pack_state};
DELETE FROM {pack_state_tid};
DELETE FROM {relstore_refs};
DELETE FROM {relstore_garbage};
DELETE FROM {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, sweeping = 0, packed_to = 0, deleted = 0;
DELETE FROM {relstore_epoch};
UPDATE {relstore_oid} SET value = 0

-- name: zap [hf]
DELETE FROM {blob_chunk};
DELETE FROM {relstore_blob};
DELETE FROM {object_state};
DELETE FROM {object_ref};
DELETE FROM {object_refs_added};
DELETE FROM {pack_object};
DELETE FROM {relstore_refs};
DELETE FROM {relstore_garbage};
DELETE FROM {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, sweeping = 0, packed_to = 0, deleted = 0;
DELETE FROM {relstore_epoch};
UPDATE {relstore_oid} SET value = 0

-- RelStorage counts oids in a file of its own, oids.sqlite3, by 16, and trusts it blindly.

-- name: has_relstorage_oid
SELECT 1 FROM sqlite_master WHERE name = 'new_oid'

-- name: relstorage_oid
SELECT coalesce(max(zoid), 0) FROM new_oid

-- name: raise_relstorage_oid (block)
UPDATE new_oid SET zoid = max(zoid, $block) RETURNING zoid

-- name: take_relstorage_oids (block, count)
UPDATE new_oid SET zoid = max(zoid, $block) + $count RETURNING zoid

-- name: make_relstorage_oid
CREATE TABLE IF NOT EXISTS new_oid (zoid INTEGER PRIMARY KEY NOT NULL);
INSERT INTO new_oid (zoid) SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM new_oid)
