-- What SQLite says otherwise. It has no server, so a commit is a series of plain statements.

-- name: begin_read
BEGIN

-- name: begin_write
BEGIN IMMEDIATE

-- name: commit
COMMIT

-- First (epoch, newest tid), then (number of the last sweep, generation of one under way), then (oid, tid) of each object
-- that changed after a tid, for every time that it did: there is no index by which to find the newest alone. Asked as a
-- join, as of a server, it takes twice as long.
-- name: poll [hp]
SELECT ({epoch}), coalesce(max(tid), 0) FROM {transaction}
UNION ALL SELECT number, generation FROM {relstore_sweep}
UNION ALL SELECT * FROM (SELECT zoid, tid FROM {object_state} WHERE tid > ? LIMIT ?)

-- name: poll [hf]
SELECT ({epoch}), coalesce(max(tid), 0) FROM {object_state}
UNION ALL SELECT number, generation FROM {relstore_sweep}
UNION ALL SELECT * FROM (SELECT zoid, tid FROM {object_state} WHERE tid > ? LIMIT ?)

-- Likewise, of each of these objects that exists. Before them, whether the transaction that a view stands on is gone.
-- name: vote [hp]
SELECT ({epoch}), max(tid) FROM {transaction}
UNION ALL SELECT number, generation FROM {relstore_sweep}
UNION ALL SELECT NOT EXISTS (SELECT 1 FROM {transaction} WHERE tid = ?), packed_to FROM {relstore_sweep}
UNION ALL SELECT c.zoid, c.tid FROM {oids} o JOIN {current_object} c ON c.zoid = o.zoid

-- name: vote [hf]
SELECT ({epoch}), coalesce(max(tid), 0) FROM {object_state}
UNION ALL SELECT number, generation FROM {relstore_sweep}
UNION ALL SELECT ? IS NULL, packed_to FROM {relstore_sweep}
UNION ALL SELECT c.zoid, c.tid FROM {oids} o JOIN {object_state} c ON c.zoid = o.zoid

-- name: insert_transaction [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension) VALUES (?, ?, ?, ?, ?)

-- name: insert_state [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)

-- name: point_current [hp]
INSERT INTO {current_object} (zoid, tid) VALUES (?, ?) ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid

-- name: insert_state [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, state_size = excluded.state_size, state = excluded.state,
    refs = excluded.refs, refs_tid = excluded.refs_tid

-- name: spare
UPDATE {relstore_garbage} SET goes = -1 WHERE zoid IN (SELECT value FROM json_each(?)) AND generation = ?

-- name: forget_garbage
DELETE FROM {relstore_garbage} WHERE rowid IN (
    SELECT g.rowid FROM {relstore_garbage} g WHERE abs(g.generation) NOT IN (?, ?)
        AND abs(g.generation) NOT IN (SELECT generation FROM {relstore_sweep}) LIMIT 2000)

-- Foreign keys are not enforced here, so chunks of blobs are removed by name.
-- name: sweep_chunks [hp]
DELETE FROM {blob_chunk} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND zoid <= ? AND goes > 0)
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = blob_chunk.zoid AND s.tid = blob_chunk.tid)

-- name: sweep_chunks [hf]
DELETE FROM {blob_chunk} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND zoid <= ? AND goes = 2)
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = blob_chunk.zoid)

-- name: sweep_current [hp]
DELETE FROM {current_object} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND zoid <= ? AND goes = 2)
    AND tid = (SELECT g.tid FROM {relstore_garbage} g WHERE g.generation = ? AND g.zoid = current_object.zoid)

-- name: sweep_states [hp]
DELETE FROM {object_state} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND zoid <= ? AND goes > 0)
    AND tid < (SELECT g.tid + g.goes - 1 FROM {relstore_garbage} g
               WHERE g.generation = ? AND g.zoid = object_state.zoid
                     AND (g.goes = 1 OR NOT EXISTS (SELECT 1 FROM {current_object} c WHERE c.zoid = g.zoid)))
RETURNING state_size

-- name: sweep_states [hf]
DELETE FROM {object_state} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND zoid <= ? AND goes = 2)
    AND tid = (SELECT g.tid FROM {relstore_garbage} g WHERE g.generation = ? AND g.zoid = object_state.zoid)
RETURNING state_size

-- name: sweep_references
DELETE FROM {relstore_refs} WHERE zoid IN (
        SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND zoid <= ? AND goes > 0)
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.zoid = relstore_refs.zoid AND s.tid = relstore_refs.tid)

-- name: forget_transactions [hp]
DELETE FROM {transaction} WHERE tid > ? AND tid <= ? AND tid > 0 AND tid < (SELECT max(tid) FROM {transaction})
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.tid = "transaction".tid)
    AND NOT (? AND EXISTS (SELECT 1 FROM {object_state} s WHERE s.prev_tid = "transaction".tid))

-- name: mark_packed [hp]
UPDATE {transaction} SET packed = 1 WHERE tid > ? AND tid <= ? AND tid > 0 AND packed = 0

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

-- name: take_oids
UPDATE {relstore_oid} SET value = value + ? RETURNING value

-- name: raise_oid
UPDATE {relstore_oid} SET value = max(value, ?)

-- name: size
SELECT (SELECT page_count FROM pragma_page_count) * (SELECT page_size FROM pragma_page_size)

-- name: zap [hp]
DELETE FROM {blob_chunk};
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
UPDATE {relstore_sweep} SET number = number + 1, generation = 0, packed_to = 0;
DELETE FROM {relstore_epoch};
UPDATE {relstore_oid} SET value = 0

-- name: zap [hf]
DELETE FROM {blob_chunk};
DELETE FROM {object_state};
DELETE FROM {object_ref};
DELETE FROM {object_refs_added};
DELETE FROM {pack_object};
DELETE FROM {relstore_refs};
DELETE FROM {relstore_garbage};
DELETE FROM {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, generation = 0, packed_to = 0;
DELETE FROM {relstore_epoch};
UPDATE {relstore_oid} SET value = 0

-- RelStorage counts oids in a file of its own, oids.sqlite3, by 16, and trusts it blindly.

-- name: has_relstorage_oid
SELECT 1 FROM sqlite_master WHERE name = 'new_oid'

-- name: relstorage_oid
SELECT coalesce(max(zoid), 0) FROM new_oid

-- name: raise_relstorage_oid
UPDATE new_oid SET zoid = max(zoid, ?) RETURNING zoid

-- name: take_relstorage_oids
UPDATE new_oid SET zoid = max(zoid, ?) + ? RETURNING zoid

-- name: make_relstorage_oid
CREATE TABLE IF NOT EXISTS new_oid (zoid INTEGER PRIMARY KEY NOT NULL);
INSERT INTO new_oid (zoid) SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM new_oid)
