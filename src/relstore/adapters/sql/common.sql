-- Every statement, in SQL that most databases understand. An overlay replaces what one of them says otherwise.
--   [hp] history-preserving, [hf] history-free; ? is a parameter; {oids} is a list of oids given as one parameter.

-- Reading ------------------------------------------------------------------------------------------------------

-- Of rows that another program has written the references are not known: NULL.
-- name: load_at [hp]
SELECT state, tid, refs FROM {object_state} WHERE zoid = ? AND tid <= ? ORDER BY tid DESC LIMIT 1

-- name: load_at [hf]
SELECT state, tid, CASE WHEN refs_tid = tid THEN refs END FROM {object_state} WHERE zoid = ? AND tid <= ?

-- name: load_now [hp]
SELECT state, tid FROM {object_state} WHERE zoid = ? ORDER BY tid DESC LIMIT 1

-- name: load_now [hf]
SELECT state, tid FROM {object_state} WHERE zoid = ?

-- name: load_serial
SELECT state FROM {object_state} WHERE zoid = ? AND tid = ?

-- The revision before a tid, and the tid of the one after it.
-- name: load_before
SELECT s.state, s.tid, (SELECT min(n.tid) FROM {object_state} n WHERE n.zoid = ? AND n.tid >= ?)
FROM {object_state} s WHERE s.zoid = ? AND s.tid < ? ORDER BY s.tid DESC LIMIT 1

-- name: load_many [hp]
SELECT s.zoid, s.state, s.tid, s.refs FROM {oids} o JOIN {object_state} s ON s.zoid = o.zoid
WHERE s.tid = (SELECT max(m.tid) FROM {object_state} m WHERE m.zoid = o.zoid AND m.tid <= ?)
      AND (s.state_size <= ? OR s.zoid = ?)

-- name: load_many [hf]
SELECT s.zoid, s.state, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END FROM {oids} o JOIN {object_state} s ON s.zoid = o.zoid
WHERE s.tid <= ? AND (s.state_size <= ? OR s.zoid = ?)

-- name: current_tid [hp]
SELECT tid FROM {current_object} WHERE zoid = ?

-- name: current_tid [hf]
SELECT tid FROM {object_state} WHERE zoid = ?

-- Polling: one row (epoch, newest tid, NULL, NULL), or one for each object changed after a tid, with those.

-- name: poll [hp]
SELECT ({epoch}), (SELECT max(t.tid) FROM {transaction} t), c.zoid, c.tid
FROM (SELECT 1 AS one) o LEFT JOIN (SELECT zoid, tid FROM {current_object} WHERE tid > ? LIMIT ?) c ON o.one = 1

-- name: poll [hf]
SELECT ({epoch}), (SELECT coalesce(max(t.tid), 0) FROM {object_state} t), c.zoid, c.tid
FROM (SELECT 1 AS one) o LEFT JOIN (SELECT zoid, tid FROM {object_state} WHERE tid > ? LIMIT ?) c ON o.one = 1

-- name: last_tid [hp]
SELECT max(tid) FROM {transaction}

-- name: last_tid [hf]
SELECT coalesce(max(tid), 0) FROM {object_state}

-- name: epoch
{epoch}

-- name: new_epoch
INSERT INTO {relstore_epoch} (one, value) VALUES (1, ?) ON CONFLICT (one) DO NOTHING

-- History ------------------------------------------------------------------------------------------------------

-- name: history [hp]
SELECT s.tid, s.state_size, t.username, t.description, t.extension
FROM {object_state} s JOIN {transaction} t ON t.tid = s.tid
WHERE s.zoid = ? ORDER BY s.tid DESC LIMIT ?

-- name: history [hf]
SELECT tid, state_size, NULL, NULL, NULL FROM {object_state} WHERE zoid = ? LIMIT ?

-- name: author [hp]
SELECT substr(username, 1, 1000), substr(description, 1, 1000) FROM {transaction} WHERE tid = ?

-- A page of what can be undone, older than a tid.
-- name: undo_log [hp]
SELECT tid, username, description, extension FROM {transaction}
WHERE tid < ? AND tid > 0 AND packed = {no} ORDER BY tid DESC LIMIT ?

-- name: transaction_is_undoable [hp]
SELECT 1 FROM {transaction} WHERE tid = ? AND tid > 0 AND packed = {no}

-- What a transaction changed: the md5 it wrote, what is current, and the revision before it.
-- name: undo [hp]
SELECT u.zoid, u.md5, c.tid, s.md5, u.prev_tid,
       (SELECT max(p.tid) FROM {object_state} p WHERE p.zoid = u.zoid AND p.tid < u.tid)
FROM {object_state} u JOIN {current_object} c ON c.zoid = u.zoid
     JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE u.tid = ? ORDER BY u.zoid

-- Iteration ----------------------------------------------------------------------------------------------------

-- name: transactions [hp]
SELECT tid, packed, username, description, extension FROM {transaction}
WHERE tid >= ? AND tid <= ? AND tid > 0 ORDER BY tid LIMIT ?

-- name: transactions [hf]
SELECT DISTINCT tid, {no}, NULL, NULL, NULL FROM {object_state} WHERE tid >= ? AND tid <= ? ORDER BY tid LIMIT ?

-- name: records [hp]
SELECT zoid, state, data_tid FROM {object_state} WHERE tid = ? AND zoid > ? ORDER BY zoid LIMIT ?

-- name: records [hf]
SELECT zoid, state, NULL FROM {object_state} WHERE tid = ? AND zoid > ? ORDER BY zoid LIMIT ?

-- The bound is on both tables, because a merge would read the other one from its beginning.
-- name: current_records [hp]
SELECT s.zoid, s.tid, s.state FROM {current_object} c JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE c.zoid >= ? AND s.zoid >= ? AND s.state IS NOT NULL ORDER BY c.zoid LIMIT ?

-- name: current_records [hf]
SELECT zoid, tid, state FROM {object_state} WHERE zoid >= ? AND zoid >= ? AND state IS NOT NULL ORDER BY zoid LIMIT ?

-- name: count_up_to [hp]
SELECT count(*) FROM (SELECT 1 FROM {current_object} LIMIT ?) c

-- name: count_up_to [hf]
SELECT count(*) FROM (SELECT 1 FROM {object_state} LIMIT ?) c

-- name: max_oid [hp]
SELECT coalesce(max(zoid), 0) FROM {current_object}

-- name: max_oid [hf]
SELECT coalesce(max(zoid), 0) FROM {object_state}

-- What relstore knows about the database -------------------------------------------------------------------------

-- name: meta
SELECT name, value FROM {relstore_meta}

-- No row, but an error where a table that was there before is somebody else's.
-- name: fits [hp]
SELECT t.packed, t.username, t.description, t.extension, s.prev_tid, s.md5, s.state_size, s.state, c.tid
FROM {transaction} t, {object_state} s, {current_object} c
WHERE t.tid = -1 AND s.zoid = -1 AND s.tid = -1 AND c.zoid = -1

-- name: fits [hf]
SELECT tid, state_size, state FROM {object_state} WHERE zoid = -1

-- name: add_meta
INSERT INTO {relstore_meta} (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING
