-- Every statement, in SQL that most databases understand, with macros for what some say otherwise. An overlay replaces
-- macros, and whole statements where that is not enough. What has no common form, because it is given columns in one
-- database and rows in another, is in the overlays alone.
--   [hp] history-preserving, [hf] history-free; $name is a parameter. s is always a revision, o an oid of a list.

-- Macros -------------------------------------------------------------------------------------------------------

-- {oids}: a list of oids, given as one parameter; {revisions}: one of pairs (oid, tid). Each database has its own.

-- Which table tells what is current, and which the newest transaction?
-- macro: current [hp]
{current_object}

-- macro: current [hf]
{object_state}

-- macro: last [hp]
{transaction}

-- macro: last [hf]
{object_state}

-- Of the tables; a part of the epoch: see migrations.py.
-- macro: version
coalesce((SELECT v.value FROM {relstore_meta} v WHERE v.name = 'schema'), '')

-- macro: limit
LIMIT $limit

-- One row, and as many as somebody would look at.
-- macro: one
LIMIT 1

-- macro: some
LIMIT 100

-- Is it a deletion?
-- macro: deleted
s.state IS NULL

-- A join with ON, in this order whatever the statistics say.
-- macro: then
CROSS JOIN

-- A row, unless there is one with its key.
-- macro: insert_new
INSERT

-- macro: or_leave
ON CONFLICT DO NOTHING

-- Where there is one revision of each object, its oid says which.
-- macro: after [hp]
(s.zoid, s.tid) > ($oid, $tid)

-- macro: after [hf]
s.zoid > $oid

-- Of what was committed later, or in the same transaction.
-- macro: later
(s.tid, s.zoid) > ($tid, $oid)

-- macro: by_revision [hp]
s.zoid, s.tid

-- macro: by_revision [hf]
s.zoid

-- References that came with the state. Of rows that another program has written they are not known: NULL.
-- macro: known [hp]
s.refs

-- macro: known [hf]
CASE WHEN s.refs_tid = s.tid THEN s.refs END

-- Those that were found out later.
-- macro: found
LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid

-- macro: unknown [hp]
s.refs IS NULL AND r.refs IS NULL

-- macro: unknown [hf]
(s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL

-- macro: if_small
CASE WHEN s.state_size <= {small_state_bytes} THEN s.state END

-- What a pack wants of a revision: the references, or the state, where they are not known and it is not large; and
-- whether it is a deletion.
-- macro: revision
s.zoid, s.tid, coalesce({known}, r.refs) AS refs,
       CASE WHEN {unknown} AND s.state_size <= {small_state_bytes} THEN s.state END, {deleted}

-- The row of an object in a list, the state that is current, and the one that is named in a row.
-- macro: garbage_of_o
{then} {relstore_garbage} g ON g.pack_id = $pack_id AND g.zoid = o.zoid

-- macro: state_of_o [hp]
{then} {current_object} c ON c.zoid = o.zoid
     {then} {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid

-- macro: state_of_o [hf]
{then} {object_state} s ON s.zoid = o.zoid

-- macro: state_of_g
{then} {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid

-- Transactions -------------------------------------------------------------------------------------------------

-- How they begin differs, and what rolls one back is in session.py.
-- name: commit
COMMIT

-- Reading ------------------------------------------------------------------------------------------------------

-- Of rows that another program has written the references are not known: NULL.
-- name: load_at (oid, at) [hp]
SELECT state, tid, refs FROM {object_state} WHERE zoid = $oid AND tid <= $at ORDER BY tid DESC {one}

-- name: load_at (oid, at) [hf]
SELECT state, tid, CASE WHEN refs_tid = tid THEN refs END AS refs FROM {object_state} WHERE zoid = $oid AND tid <= $at

-- name: load_now (oid) [hp]
SELECT state, tid FROM {object_state} WHERE zoid = $oid ORDER BY tid DESC {one}

-- name: load_now (oid) [hf]
SELECT state, tid FROM {object_state} WHERE zoid = $oid

-- name: load_serial (oid, tid)
SELECT state FROM {object_state} WHERE zoid = $oid AND tid = $tid

-- The revision before a tid, and the tid of the one after it.
-- name: load_before (oid, tid)
SELECT s.state, s.tid, (SELECT min(n.tid) FROM {object_state} n WHERE n.zoid = $oid AND n.tid >= $tid)
FROM {object_state} s WHERE s.zoid = $oid AND s.tid < $tid ORDER BY s.tid DESC {one}

-- name: load_many (oids, at, largest, first) [hp]
SELECT s.zoid, s.state, s.tid, s.refs FROM {oids} o JOIN {object_state} s ON s.zoid = o.zoid
WHERE s.tid = (SELECT max(m.tid) FROM {object_state} m WHERE m.zoid = o.zoid AND m.tid <= $at)
      AND (s.state_size <= $largest OR s.zoid = $first)

-- name: load_many (oids, at, largest, first) [hf]
SELECT s.zoid, s.state, s.tid, {known} AS refs FROM {oids} o {then} {object_state} s ON s.zoid = o.zoid
WHERE s.tid <= $at AND (s.state_size <= $largest OR s.zoid = $first)

-- name: current_tid (oid)
SELECT tid FROM {current} WHERE zoid = $oid

-- name: last_tid
SELECT coalesce(max(tid), 0) FROM {last}

-- name: epoch
{epoch}

-- name: new_epoch (value)
{insert_new} INTO {relstore_epoch} (one, value) VALUES (1, $value) {or_leave}

-- name: renew_epoch (value, old)
UPDATE {relstore_epoch} SET value = $value WHERE value = $old

-- Whether a database still stands on what was known of it: see proof.py.

-- The newest transaction up to a tid that has left anything.
-- name: stands (tid)
SELECT coalesce(max(tid), 0) FROM {last} WHERE tid <= $tid

-- name: current_tids (oids)
SELECT o.zoid, c.tid FROM {oids} o LEFT JOIN {current} c ON c.zoid = o.zoid

-- name: newest (limit)
SELECT zoid, tid FROM {object_state} ORDER BY tid DESC {limit}

-- name: packed_to
SELECT packed_to FROM {relstore_sweep}

-- History ------------------------------------------------------------------------------------------------------

-- name: history (oid, limit) [hp]
SELECT s.tid, s.state_size, t.username, t.description, t.extension
FROM {object_state} s JOIN {transaction} t ON t.tid = s.tid
WHERE s.zoid = $oid ORDER BY s.tid DESC {limit}

-- name: history (oid, limit) [hf]
SELECT tid, state_size, NULL AS username, NULL AS description, NULL AS extension FROM {object_state} WHERE zoid = $oid {limit}

-- name: author (tid) [hp]
SELECT substr(username, 1, 1000), substr(description, 1, 1000) FROM {transaction} WHERE tid = $tid

-- A page of what can be undone, older than a tid.
-- name: undo_log (before, limit) [hp]
SELECT tid, username, description, extension FROM {transaction}
WHERE tid < $before AND tid > (SELECT packed_to FROM {relstore_sweep}) AND packed = {no} ORDER BY tid DESC {limit}

-- name: transaction_is_undoable (tid) [hp]
SELECT 1 FROM {transaction} WHERE tid = $tid AND tid > (SELECT packed_to FROM {relstore_sweep}) AND packed = {no}

-- What a transaction changed: the md5 it wrote, what is current, and the revision before it.
-- name: undo (tid) [hp]
SELECT u.zoid, u.md5, c.tid, s.md5, u.prev_tid,
       (SELECT max(p.tid) FROM {object_state} p WHERE p.zoid = u.zoid AND p.tid < u.tid)
FROM {object_state} u JOIN {current_object} c ON c.zoid = u.zoid
     JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE u.tid = $tid ORDER BY u.zoid

-- Blobs --------------------------------------------------------------------------------------------------------

-- name: blob_size (oid, tid)
SELECT sum(length(chunk)) FROM {blob_chunk} WHERE zoid = $oid AND tid = $tid

-- What is recorded of it.
-- name: blob_record (oid, tid)
SELECT size, digest FROM {relstore_blob} WHERE zoid = $oid AND tid = $tid

-- Likewise the sizes, of an object's revisions and of those of the objects after it.
-- name: blob_sizes (oid, limit)
SELECT s.zoid, s.tid, s.size FROM {relstore_blob} s WHERE s.zoid >= $oid ORDER BY {by_revision} {limit}

-- Of data that was found without a record. Not where the revision is gone, or somebody else was quicker.
-- name: add_record (size, digest, oid, tid)
{insert_new} INTO {relstore_blob} (zoid, tid, size, digest)
SELECT s.zoid, s.tid, $size, $digest FROM {object_state} s WHERE s.zoid = $oid AND s.tid = $tid
{or_leave}

-- Of revisions before this one.
-- name: forget_record (oid, tid) [hf]
DELETE FROM {relstore_blob} WHERE zoid = $oid AND tid < $tid

-- name: count_records
SELECT count(*) FROM {relstore_blob}

-- To put what is kept elsewhere into the database, or what was there out of it; see places.py.
-- name: chunks_there (oid, tid, limit) [hp]
SELECT s.zoid, s.tid FROM {blob_chunk} s WHERE {after} AND s.chunk_num = 0 ORDER BY {by_revision} {limit}

-- name: chunks_there (oid, limit) [hf]
SELECT s.zoid, s.tid FROM {blob_chunk} s WHERE {after} AND s.chunk_num = 0 ORDER BY {by_revision} {limit}

-- name: chunks_of (revisions)
SELECT b.zoid, b.tid FROM {revisions} g {then} {blob_chunk} b ON b.zoid = g.zoid AND b.tid = g.tid AND b.chunk_num = 0

-- name: lock_revision (oid, tid)
SELECT zoid FROM {object_state} WHERE zoid = $oid AND tid = $tid

-- name: put_chunk (oid, tid, chunk_num, chunk)
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk) VALUES ($oid, $tid, $chunk_num, $chunk)

-- name: drop_chunks (oid, tid) [hp]
DELETE FROM {blob_chunk} WHERE zoid = $oid AND tid = $tid

-- name: drop_chunks (oid, tid) [hf]
DELETE FROM {blob_chunk} WHERE zoid = $oid AND tid <= $tid

-- As at the end of a sweep.
-- name: count_sweep
UPDATE {relstore_sweep} SET number = number + 1
-- Objects of blobs in an object storage: see objects.py. ------------------------------------------------------------

-- name: stored_blob (oid, tid)
SELECT b.size, b.digest, d.version FROM {relstore_blob} b LEFT JOIN {relstore_digest} d ON d.digest = b.digest
WHERE b.zoid = $oid AND b.tid = $tid

-- To move it elsewhere; see places.py.
-- name: stored_there (oid, tid, limit) [hp]
SELECT s.zoid, s.tid FROM {relstore_blob} s {then} {relstore_digest} d ON d.digest = s.digest
WHERE {after} AND d.state < {object_goes} ORDER BY {by_revision} {limit}

-- name: stored_there (oid, limit) [hf]
SELECT s.zoid, s.tid FROM {relstore_blob} s {then} {relstore_digest} d ON d.digest = s.digest
WHERE {after} AND d.state < {object_goes} ORDER BY {by_revision} {limit}

-- name: stored_of (revisions)
SELECT b.zoid, b.tid FROM {revisions} g {then} {relstore_blob} b ON b.zoid = g.zoid AND b.tid = g.tid
    {then} {relstore_digest} d ON d.digest = b.digest
WHERE d.state < {object_goes}

-- Whoever holds it, or a row of relstore_blob, waits for nobody but who changes it at that moment, and keeps that off.
-- name: hold_object (digest)
SELECT version FROM {relstore_digest} WHERE digest = $digest AND state < {object_goes} {hold}

-- name: hold_record (oid, tid)
SELECT size, digest FROM {relstore_blob} WHERE zoid = $oid AND tid = $tid {hold}

-- name: want_object (digest, version, size, wisher)
INSERT INTO {relstore_digest} AS d (digest, version, size, wanted, wisher, state)
VALUES ($digest, $version, $size, {now_seconds}, $wisher, {object_used})
ON CONFLICT (digest) DO UPDATE SET
    version = CASE WHEN d.state = {object_goes} THEN excluded.version ELSE d.version END,
    wanted = excluded.wanted, wisher = excluded.wisher, state = excluded.state

-- name: wanted_version (digest)
SELECT version FROM {relstore_digest} WHERE digest = $digest AND state < {object_goes}

-- name: objects (digest, limit)
SELECT d.digest, d.version, d.size, d.state, {now_seconds} - d.wanted,
       EXISTS (SELECT 1 FROM {relstore_blob} b WHERE b.digest = d.digest)
FROM {relstore_digest} d WHERE d.digest > $digest ORDER BY d.digest {limit}

-- name: mark_object (digest, mark)
UPDATE {relstore_digest} SET state = $mark, wanted = {now_seconds} WHERE digest = $digest

-- name: lock_object (digest, version)
SELECT state, wisher, {now_seconds} - wanted FROM {relstore_digest}
WHERE digest = $digest AND version = $version AND state < {object_goes} {lock_if_free}

-- name: refers (digest)
SELECT zoid FROM {relstore_blob} WHERE digest = $digest {one}

-- name: claim_object (digest)
UPDATE {relstore_digest} SET state = {object_goes} WHERE digest = $digest

-- name: forget_object (digest, version)
DELETE FROM {relstore_digest} WHERE digest = $digest AND version = $version AND state = {object_goes}

-- name: has_blobs
SELECT zoid FROM {blob_chunk} {one}

-- Which of these have data?
-- name: with_blobs (oids)
SELECT b.zoid FROM {oids} o {then} {blob_chunk} b ON b.zoid = o.zoid {one}

-- Of these, the ones that have data, or of which any is recorded.
-- name: blobs_of (oids) [hf]
SELECT b.zoid FROM {oids} o {then} {blob_chunk} b ON b.zoid = o.zoid
UNION SELECT r.zoid FROM {oids} o {then} {relstore_blob} r ON r.zoid = o.zoid

-- Iteration ----------------------------------------------------------------------------------------------------

-- name: transactions (tid, stop, limit) [hp]
SELECT tid, packed, username, description, extension FROM {transaction}
WHERE tid >= $tid AND tid <= $stop AND tid > 0 ORDER BY tid {limit}

-- name: transactions (tid, stop, limit) [hf]
SELECT DISTINCT tid, {no} AS packed, NULL AS username, NULL AS description, NULL AS extension
FROM {object_state} WHERE tid >= $tid AND tid <= $stop ORDER BY tid {limit}

-- name: records (tid, oid, limit) [hp]
SELECT zoid, state, data_tid FROM {object_state} WHERE tid = $tid AND zoid > $oid ORDER BY zoid {limit}

-- name: records (tid, oid, limit) [hf]
SELECT zoid, state, NULL FROM {object_state} WHERE tid = $tid AND zoid > $oid ORDER BY zoid {limit}

-- The bound is on both tables, because a merge would read the other one from its beginning.
-- name: current_records (oid, limit) [hp]
SELECT s.zoid, s.tid, s.state FROM {current_object} c JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE c.zoid >= $oid AND s.zoid >= $oid AND s.state IS NOT NULL ORDER BY c.zoid {limit}

-- name: current_records (oid, limit) [hf]
SELECT zoid, tid, state FROM {object_state} WHERE zoid >= $oid AND state IS NOT NULL ORDER BY zoid {limit}

-- name: count_up_to (limit) [hp]
SELECT count(*) FROM (SELECT 1 FROM {current_object} {limit}) c

-- name: count_up_to (limit) [hf]
SELECT count(*) FROM (SELECT 1 FROM {object_state} WHERE state IS NOT NULL {limit}) c

-- name: max_oid
SELECT coalesce(max(zoid), 0) FROM {current}

-- Packing: see pack.py -----------------------------------------------------------------------------------------

-- A page of all revisions, by oid and tid after those given.
-- name: revisions (oid, tid, limit) [hp]
SELECT {revision}
FROM {object_state} s {found} WHERE {after} ORDER BY {by_revision} {limit}

-- name: revisions (oid, limit) [hf]
SELECT {revision}
FROM {object_state} s {found} WHERE {after} ORDER BY {by_revision} {limit}

-- The same without references, for a pack that collects no garbage.
-- name: revisions_only (oid, tid, limit) [hp]
SELECT s.zoid, s.tid, NULL AS refs, NULL AS state, {deleted} FROM {object_state} s WHERE {after} ORDER BY {by_revision} {limit}

-- name: revisions_only (oid, limit) [hf]
SELECT s.zoid, s.tid, NULL AS refs, NULL AS state, {deleted} FROM {object_state} s WHERE {after} ORDER BY {by_revision} {limit}

-- A page of what was committed after a tid, by tid and oid after those given.
-- name: changes (tid, oid, limit)
SELECT {revision}
FROM {object_state} s {found}
WHERE {later} ORDER BY s.tid, s.zoid {limit}

-- The same of objects that are to go, as they were when they were marked.
-- name: garbage_revisions (oids, pack_id)
SELECT {revision}
FROM {oids} o {garbage_of_o}
     {state_of_g}
     {found}

-- The same of what is current.
-- name: current_revisions (oids)
SELECT {revision}
FROM {oids} o {state_of_o}
     {found}

-- name: last_pack
SELECT pack_id, pack_tid, marked_tid, gc, progress, token, objects FROM {relstore_pack}
WHERE progress <> 'marking' ORDER BY pack_id DESC {one}

-- The last that has collected garbage: it says since when that is unreachable.
-- name: last_marked
SELECT pack_id FROM {relstore_pack} WHERE progress = 'swept' AND gc <> {no} ORDER BY pack_id DESC {one}

-- name: has_tid (tid) [hp]
SELECT 1 FROM {transaction} WHERE tid = $tid

-- name: has_tid (tid) [hf]
SELECT 1 FROM {object_state} WHERE tid = $tid {one}

-- name: next_pack
SELECT coalesce(max(pack_id), 0) + 1 FROM {relstore_pack}

-- name: new_pack (pack_id, pack_tid, marked_tid, gc, token)
INSERT INTO {relstore_pack} (pack_id, pack_tid, marked_tid, gc, progress, token, objects, number)
VALUES ($pack_id, $pack_tid, $marked_tid, $gc, 'marking', $token, 0, 0)

-- name: pack_prepared (progress, objects, pack_id)
UPDATE {relstore_pack} SET progress = $progress, objects = $objects WHERE pack_id = $pack_id

-- name: garbage (pack_id, oid, limit)
SELECT zoid, tid, since, goes FROM {relstore_garbage} WHERE pack_id = $pack_id AND zoid > $oid ORDER BY zoid {limit}

-- Up to where the next so many go.
-- name: garbage_end (pack_id, oid, limit)
SELECT max(zoid) FROM (SELECT zoid FROM {relstore_garbage}
                       WHERE pack_id = $pack_id AND zoid > $oid AND goes > {goes_later} ORDER BY zoid {limit}) g

-- name: sweep_state
SELECT number, sweeping FROM {relstore_sweep}

-- name: start_sweep (pack_id, pack_tid)
UPDATE {relstore_sweep} SET sweeping = $pack_id,
    packed_to = CASE WHEN packed_to < $pack_tid THEN $pack_tid ELSE packed_to END

-- name: has_list (pack_id, token)
SELECT 1 FROM {relstore_pack} WHERE pack_id = $pack_id AND token = $token

-- name: pack_sweeping (pack_id)
UPDATE {relstore_pack} SET progress = 'sweeping' WHERE pack_id = $pack_id

-- One that was interrupted, and whose list is gone: what it has removed is not known, so its number is that of no list.
-- name: forget_sweep
UPDATE {relstore_sweep} SET sweeping = 0, number = number + 1 WHERE sweeping > 0

-- name: end_sweep (pack_id)
UPDATE {relstore_sweep} SET sweeping = 0, number = number + 1 WHERE sweeping = $pack_id

-- Let votes know that connections of before may hold what is being deleted.
-- name: tell_deletion [hp]
UPDATE {relstore_sweep} SET deleted = 1 + (SELECT max(tid) FROM {transaction})

-- name: tell_deletion [hf]
UPDATE {relstore_sweep} SET deleted = 1 + (SELECT coalesce(max(tid), 0) FROM {object_state})

-- Of an earlier sweep nobody asks any more; nor of one whose row came with a list from a copy of the database.
-- name: forget_numbers
UPDATE {relstore_pack} SET number = 0 WHERE number > 0

-- name: pack_swept (pack_id)
UPDATE {relstore_pack} SET progress = 'swept', number = (SELECT number FROM {relstore_sweep}),
    objects = (SELECT count(*) FROM {relstore_garbage} g WHERE g.pack_id = $pack_id AND g.goes = {goes_object})
WHERE pack_id = $pack_id

-- Which of these are going, or have gone, in the sweep that is under way? And -1, if the list of its pack is not its
-- own: one of a copy of the database may have taken its place.
-- name: going (oids, pack_id)
SELECT zoid FROM (SELECT o.zoid FROM {oids} o {garbage_of_o} WHERE g.goes = {goes_object} {some}) found
UNION ALL SELECT -1 FROM {relstore_sweep} WHERE NOT EXISTS (
    SELECT 1 FROM {relstore_pack} p CROSS JOIN {relstore_meta} m
    WHERE p.pack_id = $pack_id AND m.name = 'sweeping' AND m.value = p.token)

-- What of a list goes later, and which of these do; that some of these were linked or changed since; and all of which
-- that was written down.
-- name: marks (pack_id, limit) [hf]
SELECT zoid FROM {relstore_garbage} WHERE pack_id = $pack_id AND goes = {goes_later} ORDER BY zoid {limit}

-- name: marked (oids, pack_id) [hf]
SELECT o.zoid FROM {oids} o {garbage_of_o} WHERE g.goes = {goes_later}

-- name: take_marks (oids, pack_id) [hf]
{insert_new} INTO {relstore_garbage} (pack_id, zoid, tid, since, goes)
SELECT -p.pack_id, o.zoid, 0, 0, {goes_spared} FROM {relstore_pack} p CROSS JOIN {oids} o WHERE p.pack_id = $pack_id
{or_leave}

-- name: taken_marks [hf]
SELECT zoid FROM {relstore_garbage} WHERE pack_id < 0

-- Which of these are not there, or deleted?
-- name: missing (oids) [hp]
SELECT o.zoid FROM {oids} o LEFT JOIN {current_object} c ON c.zoid = o.zoid
    LEFT JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid WHERE s.state IS NULL {some}

-- name: missing (oids) [hf]
SELECT o.zoid FROM {oids} o LEFT JOIN {object_state} s ON s.zoid = o.zoid WHERE s.state IS NULL {some}

-- What a sweep has removed, if that is still known.
-- name: swept (number, oid, limit)
SELECT zoid FROM {relstore_garbage}
WHERE pack_id = (SELECT max(p.pack_id) FROM {relstore_pack} p WHERE p.number = $number) AND zoid > $oid
    AND goes = {goes_object}
ORDER BY zoid {limit}

-- name: swept_count (number)
SELECT objects FROM {relstore_pack} WHERE number = $number

-- Up to where the next so many transactions are.
-- name: transactions_end (tid, stop, limit) [hp]
SELECT max(tid) FROM (SELECT tid FROM {transaction} WHERE tid > $tid AND tid <= $stop ORDER BY tid {limit}) t

-- What would go of some objects, given with the tids up to which: how many states, their bytes, and of the newest the
-- tid and, if it is not large, the state.
-- name: garbage_sizes (revisions) [hp]
SELECT s.zoid, g.states, g.bytes, s.tid, {if_small}
FROM (SELECT n.zoid, count(*) AS states, CAST(sum(n.state_size) AS {integer}) AS bytes, max(n.tid) AS tid
      FROM {revisions} g {then} {object_state} n ON n.zoid = g.zoid AND n.tid <= g.tid GROUP BY n.zoid) g
     {state_of_g}

-- name: garbage_sizes (revisions) [hf]
SELECT s.zoid, 1, s.state_size, s.tid, {if_small} FROM {revisions} g {state_of_g}

-- Likewise, of how many blobs among them the size is recorded, and their bytes.
-- name: garbage_blobs (revisions) [hp]
SELECT count(*), CAST(coalesce(sum(r.size), 0) AS {integer})
FROM {revisions} g {then} {relstore_blob} r ON r.zoid = g.zoid AND r.tid <= g.tid

-- name: garbage_blobs (revisions) [hf]
SELECT count(*), CAST(coalesce(sum(r.size), 0) AS {integer})
FROM {revisions} g {then} {relstore_blob} r ON r.zoid = g.zoid AND r.tid = g.tid

-- How many bytes the revisions after a transaction have. It reads all of them, but not their states.
-- name: states_size (tid)
SELECT CAST(coalesce(sum(s.state_size), 0) AS {integer}) FROM {object_state} s WHERE s.tid > $tid

-- The last of the next so many objects.
-- name: objects_end (oid, limit)
SELECT max(zoid) FROM (SELECT zoid FROM {current} WHERE zoid > $oid ORDER BY zoid {limit}) c

-- A page of the revisions whose references are not known, of objects up to one, after those given.
-- name: unknown_references (oid, tid, upto_oid, limit) [hp]
SELECT s.zoid, s.tid, {if_small}
FROM {object_state} s {found}
WHERE {after} AND s.zoid <= $upto_oid AND s.state IS NOT NULL AND {unknown} ORDER BY {by_revision} {limit}

-- name: unknown_references (oid, upto_oid, limit) [hf]
SELECT s.zoid, s.tid, {if_small}
FROM {object_state} s {found}
WHERE {after} AND s.zoid <= $upto_oid AND s.state IS NOT NULL AND {unknown} ORDER BY {by_revision} {limit}

-- A page of revisions: the references as they came with the state, as they were found out later, and the state.
-- name: known_references (oid, tid, upto_oid, limit) [hp]
SELECT s.zoid, s.tid, {known} AS refs, r.refs AS found, {if_small}
FROM {object_state} s {found}
WHERE {after} AND s.zoid <= $upto_oid AND s.state IS NOT NULL ORDER BY {by_revision} {limit}

-- name: known_references (oid, upto_oid, limit) [hf]
SELECT s.zoid, s.tid, {known} AS refs, r.refs AS found, {if_small}
FROM {object_state} s {found}
WHERE {after} AND s.zoid <= $upto_oid AND s.state IS NOT NULL ORDER BY {by_revision} {limit}

-- What relstore knows about the database -------------------------------------------------------------------------

-- name: meta
SELECT name, value FROM {relstore_meta}

-- Which of these revisions are there?
-- name: existing (revisions)
SELECT s.zoid, s.tid FROM {revisions} g {then} {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid

-- name: set_meta (name, value)
INSERT INTO {relstore_meta} (name, value) VALUES ($name, $value) ON CONFLICT (name) DO UPDATE SET value = excluded.value

-- After a sweep that has removed no garbage.
-- name: stay_whole (value, old)
UPDATE {relstore_meta} SET value = $value WHERE name = 'whole' AND value = $old

-- What is said of the place of blobs.
-- name: forget_place
DELETE FROM {relstore_meta} WHERE name IN ('blobs', 'blobs-moved')

-- name: forget_whole
DELETE FROM {relstore_meta} WHERE name = 'whole'

-- By which RelStorage polls. A new database does without: each object that is changed would change it, too.
-- name: index_for_relstorage [hp]
CREATE INDEX IF NOT EXISTS current_object_tid ON {current_object} (tid)

-- name: add_meta (name, value)
{insert_new} INTO {relstore_meta} (name, value) VALUES ($name, $value) {or_leave}
