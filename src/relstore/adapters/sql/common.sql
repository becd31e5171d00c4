-- Every statement, in SQL that most databases understand. An overlay replaces what one of them says otherwise.
--   [hp] history-preserving, [hf] history-free; ? is a parameter; {oids} is a list of oids given as one parameter,
--   {revisions} one of pairs (oid, tid).

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

-- name: last_tid [hp]
SELECT coalesce(max(tid), 0) FROM {transaction}

-- name: last_tid [hf]
SELECT coalesce(max(tid), 0) FROM {object_state}

-- name: epoch
{epoch}

-- name: new_epoch
INSERT INTO {relstore_epoch} (one, value) VALUES (1, ?) ON CONFLICT (one) DO NOTHING

-- name: renew_epoch
UPDATE {relstore_epoch} SET value = ? WHERE value = ?

-- Whether a database still stands on what was known of it: see proof.py.

-- The newest transaction up to a tid that has left anything.
-- name: stands [hp]
SELECT coalesce(max(tid), 0) FROM {transaction} WHERE tid <= ?

-- name: stands [hf]
SELECT coalesce(max(tid), 0) FROM {object_state} WHERE tid <= ?

-- name: current_tids [hp]
SELECT o.zoid, c.tid FROM {oids} o LEFT JOIN {current_object} c ON c.zoid = o.zoid

-- name: current_tids [hf]
SELECT o.zoid, c.tid FROM {oids} o LEFT JOIN {object_state} c ON c.zoid = o.zoid

-- name: newest
SELECT zoid, tid FROM {object_state} ORDER BY tid DESC LIMIT ?

-- name: packed_to
SELECT packed_to FROM {relstore_sweep}

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
WHERE tid < ? AND tid > (SELECT packed_to FROM {relstore_sweep}) AND packed = {no} ORDER BY tid DESC LIMIT ?

-- name: transaction_is_undoable [hp]
SELECT 1 FROM {transaction} WHERE tid = ? AND tid > (SELECT packed_to FROM {relstore_sweep}) AND packed = {no}

-- What a transaction changed: the md5 it wrote, what is current, and the revision before it.
-- name: undo [hp]
SELECT u.zoid, u.md5, c.tid, s.md5, u.prev_tid,
       (SELECT max(p.tid) FROM {object_state} p WHERE p.zoid = u.zoid AND p.tid < u.tid)
FROM {object_state} u JOIN {current_object} c ON c.zoid = u.zoid
     JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE u.tid = ? ORDER BY u.zoid

-- Blobs --------------------------------------------------------------------------------------------------------

-- name: has_blobs
SELECT zoid FROM {blob_chunk} LIMIT 1

-- Which of these have data?
-- name: with_blobs
SELECT b.zoid FROM {oids} o CROSS JOIN {blob_chunk} b WHERE b.zoid = o.zoid LIMIT 1

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
SELECT count(*) FROM (SELECT 1 FROM {object_state} WHERE state IS NOT NULL LIMIT ?) c

-- name: max_oid [hp]
SELECT coalesce(max(zoid), 0) FROM {current_object}

-- name: max_oid [hf]
SELECT coalesce(max(zoid), 0) FROM {object_state}

-- Packing: see pack.py -----------------------------------------------------------------------------------------

-- A page of all revisions, by oid and tid after those given (where there is one of each object, by oid). The state, where
-- the references are not known and it is not large; and whether it is a deletion.
-- name: revisions [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.zoid, s.tid) > (?, ?) ORDER BY s.zoid, s.tid LIMIT ?

-- name: revisions [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE s.zoid > ? ORDER BY s.zoid LIMIT ?

-- The same without references, for a pack that collects no garbage.
-- name: revisions_only [hp]
SELECT zoid, tid, NULL, NULL, state IS NULL FROM {object_state}
WHERE (zoid, tid) > (?, ?) ORDER BY zoid, tid LIMIT ?

-- name: revisions_only [hf]
SELECT zoid, tid, NULL, NULL, state IS NULL FROM {object_state} WHERE zoid > ? ORDER BY zoid LIMIT ?

-- A page of what was committed after a tid, by tid and oid after those given.
-- name: changes [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.tid, s.zoid) > (?, ?) ORDER BY s.tid, s.zoid LIMIT ?

-- name: changes [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.tid, s.zoid) > (?, ?) ORDER BY s.tid, s.zoid LIMIT ?

-- The same of objects that are to go, as they were when they were marked. CROSS JOIN is in this order on SQLite.
-- name: garbage_revisions [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {oids} o CROSS JOIN {relstore_garbage} g CROSS JOIN {object_state} s
     LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE g.generation = ? AND g.zoid = o.zoid AND s.zoid = g.zoid AND s.tid = g.tid

-- name: garbage_revisions [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM {oids} o CROSS JOIN {relstore_garbage} g CROSS JOIN {object_state} s
     LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE g.generation = ? AND g.zoid = o.zoid AND s.zoid = g.zoid AND s.tid = g.tid

-- The same of what is current.
-- name: current_revisions [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {oids} o CROSS JOIN {current_object} c CROSS JOIN {object_state} s
     LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE c.zoid = o.zoid AND s.zoid = c.zoid AND s.tid = c.tid

-- name: current_revisions [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM {oids} o CROSS JOIN {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE s.zoid = o.zoid

-- name: save_references [hp]
INSERT INTO {relstore_refs} (zoid, tid, refs) VALUES (?, ?, ?) ON CONFLICT (zoid, tid) DO NOTHING

-- name: save_references [hf]
INSERT INTO {relstore_refs} (zoid, tid, refs) VALUES (?, ?, ?)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, refs = excluded.refs

-- name: last_pack
SELECT generation, pack_tid, marked_tid, gc, progress, token, objects FROM {relstore_pack}
WHERE progress <> 'marking' ORDER BY generation DESC LIMIT 1

-- The last that has collected garbage: it says since when that is unreachable.
-- name: last_marked
SELECT generation FROM {relstore_pack} WHERE progress = 'swept' AND gc <> {no} ORDER BY generation DESC LIMIT 1

-- name: has_tid [hp]
SELECT 1 FROM {transaction} WHERE tid = ?

-- name: has_tid [hf]
SELECT 1 FROM {object_state} WHERE tid = ? LIMIT 1

-- name: next_generation
SELECT coalesce(max(generation), 0) + 1 FROM {relstore_pack}

-- name: new_pack
INSERT INTO {relstore_pack} (generation, pack_tid, marked_tid, gc, progress, token, objects, number)
VALUES (?, ?, ?, ?, 'marking', ?, 0, 0)

-- name: pack_prepared
UPDATE {relstore_pack} SET progress = ?, objects = ? WHERE generation = ?

-- name: add_garbage
INSERT INTO {relstore_garbage} (generation, zoid, tid, since, goes) VALUES (?, ?, ?, ?, ?)

-- name: garbage
SELECT zoid, tid, since, goes FROM {relstore_garbage} WHERE generation = ? AND zoid > ? ORDER BY zoid LIMIT ?

-- Up to where the next so many go.
-- name: garbage_end
SELECT max(zoid) FROM (SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid > ? AND goes > 0
                       ORDER BY zoid LIMIT ?) g

-- name: sweep_state
SELECT number, CASE WHEN generation > 0 THEN generation ELSE 0 END FROM {relstore_sweep}

-- name: start_sweep
UPDATE {relstore_sweep} SET generation = ?, packed_to = CASE WHEN packed_to < ? THEN ? ELSE packed_to END

-- name: has_list
SELECT 1 FROM {relstore_pack} WHERE generation = ? AND token = ?

-- name: pack_sweeping
UPDATE {relstore_pack} SET progress = 'sweeping' WHERE generation = ?

-- One that was interrupted, and whose list is gone: what it has removed is not known, so its number is that of no list.
-- name: forget_sweep
UPDATE {relstore_sweep} SET generation = 0, number = number + 1 WHERE generation > 0

-- What was deleted during the sweep the views know that have seen the newest transaction.
-- name: end_sweep [hp]
UPDATE {relstore_sweep} SET generation = -(SELECT max(tid) FROM {transaction}), number = number + 1
WHERE generation = ?

-- name: end_sweep [hf]
UPDATE {relstore_sweep} SET generation = -(SELECT coalesce(max(tid), 0) FROM {object_state}), number = number + 1
WHERE generation = ?

-- Let votes know that views of before may hold what is being deleted. During a sweep they look in any case.
-- name: tell_deletion [hp]
UPDATE {relstore_sweep} SET generation = -1 - (SELECT max(tid) FROM {transaction}) WHERE generation <= 0

-- name: tell_deletion [hf]
UPDATE {relstore_sweep} SET generation = -1 - (SELECT coalesce(max(tid), 0) FROM {object_state}) WHERE generation <= 0

-- Of an earlier sweep nobody asks any more; nor of one whose row came with a list from a copy of the database.
-- name: forget_numbers
UPDATE {relstore_pack} SET number = 0 WHERE number > 0

-- name: pack_swept
UPDATE {relstore_pack} SET progress = 'swept', number = (SELECT number FROM {relstore_sweep}),
    objects = (SELECT count(*) FROM {relstore_garbage} g WHERE g.generation = ? AND g.goes = 2) WHERE generation = ?

-- Which of these are going, or have gone, in the sweep that is under way? And -1, if the list of its generation is not its
-- own: one of a copy of the database may have taken its place.
-- name: going
SELECT zoid FROM (SELECT g.zoid FROM {oids} o CROSS JOIN {relstore_garbage} g
                  WHERE g.generation = ? AND g.zoid = o.zoid AND g.goes = 2 LIMIT 100) found
UNION ALL SELECT -1 FROM {relstore_sweep} WHERE NOT EXISTS (
    SELECT 1 FROM {relstore_pack} p CROSS JOIN {relstore_meta} m
    WHERE p.generation = ? AND m.name = 'sweeping' AND m.value = p.token)

-- What of a list goes later, and which of these do; that some of these were linked or changed since; and all of which that
-- was written down.
-- name: marks [hf]
SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND goes = 0 ORDER BY zoid LIMIT ?

-- name: marked [hf]
SELECT g.zoid FROM {oids} o CROSS JOIN {relstore_garbage} g WHERE g.generation = ? AND g.zoid = o.zoid AND g.goes = 0

-- name: take_marks [hf]
INSERT INTO {relstore_garbage} (generation, zoid, tid, since, goes)
SELECT -p.generation, o.zoid, 0, 0, -1 FROM {oids} o CROSS JOIN {relstore_pack} p WHERE p.generation = ?
ON CONFLICT (generation, zoid) DO NOTHING

-- name: taken_marks [hf]
SELECT zoid FROM {relstore_garbage} WHERE generation < 0

-- Which of these are not there, or deleted?
-- name: missing [hp]
SELECT o.zoid FROM {oids} o LEFT JOIN {current_object} c ON c.zoid = o.zoid
    LEFT JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid WHERE s.state IS NULL LIMIT 100

-- name: missing [hf]
SELECT o.zoid FROM {oids} o LEFT JOIN {object_state} s ON s.zoid = o.zoid WHERE s.state IS NULL LIMIT 100

-- What a sweep has removed, if that is still known.
-- name: swept
SELECT zoid FROM {relstore_garbage}
WHERE generation = (SELECT max(p.generation) FROM {relstore_pack} p WHERE p.number = ?) AND zoid > ? AND goes = 2
ORDER BY zoid LIMIT ?

-- name: swept_count
SELECT objects FROM {relstore_pack} WHERE number = ?

-- Up to where the next so many transactions are.
-- name: transactions_end [hp]
SELECT max(tid) FROM (SELECT tid FROM {transaction} WHERE tid > ? AND tid <= ? ORDER BY tid LIMIT ?) t

-- What would go of some objects, given with the tids up to which: how many states, their bytes, and of the newest the tid
-- and, if it is not large, the state.
-- name: garbage_sizes [hp]
SELECT n.zoid, z.states, z.bytes, n.tid, CASE WHEN n.state_size <= 20000 THEN n.state END
FROM (SELECT s.zoid, count(*) AS states, CAST(sum(s.state_size) AS {integer}) AS bytes, max(s.tid) AS tid
      FROM {revisions} r CROSS JOIN {object_state} s WHERE s.zoid = r.zoid AND s.tid <= r.tid GROUP BY s.zoid) z
     CROSS JOIN {object_state} n WHERE n.zoid = z.zoid AND n.tid = z.tid

-- name: garbage_sizes [hf]
SELECT n.zoid, 1, n.state_size, n.tid, CASE WHEN n.state_size <= 20000 THEN n.state END
FROM {revisions} r CROSS JOIN {object_state} n WHERE n.zoid = r.zoid AND n.tid = r.tid

-- The last of the next so many objects.
-- name: objects_end [hp]
SELECT max(zoid) FROM (SELECT zoid FROM {current_object} WHERE zoid > ? ORDER BY zoid LIMIT ?) c

-- name: objects_end [hf]
SELECT max(zoid) FROM (SELECT zoid FROM {object_state} WHERE zoid > ? ORDER BY zoid LIMIT ?) c

-- A page of the revisions whose references are not known, of objects up to one, after those given (where there is one of
-- each object, by oid).
-- name: unknown_references [hp]
SELECT s.zoid, s.tid, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.zoid, s.tid) > (?, ?) AND s.zoid <= ? AND s.state IS NOT NULL AND s.refs IS NULL AND r.refs IS NULL
ORDER BY s.zoid, s.tid LIMIT ?

-- name: unknown_references [hf]
SELECT s.zoid, s.tid, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE s.zoid > ? AND s.zoid <= ? AND s.state IS NOT NULL
      AND (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL ORDER BY s.zoid LIMIT ?

-- A page of revisions: the references as they came with the state, as they were found out later, and the state.
-- name: known_references [hp]
SELECT s.zoid, s.tid, s.refs, r.refs, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.zoid, s.tid) > (?, ?) AND s.zoid <= ? AND s.state IS NOT NULL ORDER BY s.zoid, s.tid LIMIT ?

-- name: known_references [hf]
SELECT s.zoid, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs,
       CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE s.zoid > ? AND s.zoid <= ? AND s.state IS NOT NULL ORDER BY s.zoid LIMIT ?

-- What relstore knows about the database -------------------------------------------------------------------------

-- name: meta
SELECT name, value FROM {relstore_meta}

-- name: set_meta
INSERT INTO {relstore_meta} (name, value) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- After a sweep that has removed no garbage.
-- name: stay_whole
UPDATE {relstore_meta} SET value = ? WHERE name = 'whole' AND value = ?

-- name: forget_whole
DELETE FROM {relstore_meta} WHERE name = 'whole'

-- By which RelStorage polls. A new database does without: each object that is changed would change it, too.
-- name: index_for_relstorage [hp]
CREATE INDEX IF NOT EXISTS current_object_tid ON {current_object} (tid)

-- name: add_meta
INSERT INTO {relstore_meta} (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING
