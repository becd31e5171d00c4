-- What PostgreSQL says otherwise.

-- Macros -------------------------------------------------------------------------------------------------------

-- Types of columns, and a value of one.
-- macro: id
BIGINT

-- macro: integer
BIGINT

-- macro: bytes
BYTEA

-- macro: chunk
OID

-- macro: bool
BOOLEAN

-- macro: no
FALSE

-- macro: md5
CHAR(32)

-- macro: digest
BYTEA

-- macro: text
TEXT

-- macro: unlogged
UNLOGGED

-- macro: oids
(SELECT pg_catalog.unnest($oids::bigint[]) AS zoid)

-- An array of pairs.
-- macro: revisions
(SELECT p.pairs[n][1] AS zoid, p.pairs[n][2] AS tid
      FROM (SELECT $revisions::bigint[] AS pairs) p CROSS JOIN LATERAL pg_catalog.generate_subscripts(p.pairs, 1) n)

-- macro: then
JOIN

-- For each object a probe of its own, whatever the statistics say.
-- macro: found
LEFT JOIN LATERAL (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true

-- macro: garbage_of_o
CROSS JOIN LATERAL (SELECT * FROM {relstore_garbage} WHERE pack_id = $pack_id AND zoid = o.zoid LIMIT 1) g

-- macro: state_of_o [hp]
CROSS JOIN LATERAL (SELECT tid FROM {current_object} WHERE zoid = o.zoid LIMIT 1) c
     CROSS JOIN LATERAL (SELECT * FROM {object_state} WHERE zoid = o.zoid AND tid = c.tid LIMIT 1) s

-- macro: state_of_o [hf]
CROSS JOIN LATERAL (SELECT * FROM {object_state} WHERE zoid = o.zoid LIMIT 1) s

-- macro: state_of_g
CROSS JOIN LATERAL (SELECT * FROM {object_state} WHERE zoid = g.zoid AND tid = g.tid LIMIT 1) s

-- The row's value is as random as it can be, but a dump carries it. It does not carry the table's own oid and which
-- transaction wrote the row. A copy of all files does, but to put one in the place of another the server has to be
-- started.
-- macro: epoch
SELECT e.value || '.' || e.tableoid::text || '.' || e.xmin::text || '.' || {version} || '.'
    || (extract(epoch FROM pg_catalog.pg_postmaster_start_time())::double precision
        * 1000000::double precision)::bigint::text FROM {relstore_epoch} e

-- Whether what a transaction stands on is gone: see proof.py. In relstore_vote.
-- macro: lost [hp]
(p_at > (SELECT s.packed_to FROM {relstore_sweep} s)
        AND NOT EXISTS (SELECT FROM {transaction} t WHERE t.tid = p_at))

-- macro: lost [hf]
EXISTS (SELECT FROM unnest(p_known_oids, p_known_tids) k (zoid, tid)
                   JOIN {object_state} c ON c.zoid = k.zoid WHERE c.tid < k.tid)

-- In relstore_finish.
-- macro: insert_transaction [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension)
        VALUES (v_tid, p_packed, p_user, p_description, p_extension);

-- macro: insert_transaction [hf]

-- macro: call_finish
SELECT pg_catalog.set_config('relstore.tid', {relstore_finish_3}(
    $transaction::bigint, $timeout::text, {group}, $restored_tid::bigint, $packed::boolean, $username::bytea, $description::bytea, $extension::bytea, $staged::boolean,
    $oids::bigint[], $starts::integer[], $sizes::integer[], $md5s::text[], $data_tids::bigint[], $refs_starts::integer[], $refs_sizes::integer[],
    $states::bytea, $refs::bytea), false)

-- In finish_with_blobs: the large objects, and what relstore_finish has chosen. What is patient there is here, too.
-- macro: make_chunks
SELECT pg_catalog.set_config('lock_timeout', $timeout::text, true), pg_catalog.set_config('relstore.chunks', coalesce(
    (SELECT pg_catalog.array_agg(pg_catalog.lo_from_bytea(0::oid, pg_catalog.substring($data::bytea, r.start + 1, r.size))
                                 ORDER BY r.n)::text
     FROM unnest($blob_starts::integer[], $blob_sizes::integer[]) WITH ORDINALITY r (start, size, n)), $chunks::text), true)

-- macro: insert_chunks
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk)
SELECT c.zoid, {finished_tid}, 0, c.chunk
FROM unnest($blob_oids::bigint[], pg_catalog.current_setting('relstore.chunks')::oid[]) c (zoid, chunk)

-- macro: now_seconds
extract(epoch FROM pg_catalog.clock_timestamp())::bigint

-- Beside others who do, and who change what is no key.
-- macro: hold
FOR KEY SHARE

-- macro: lock_if_free
FOR UPDATE SKIP LOCKED

-- What is recorded of them.
-- macro: insert_records
INSERT INTO {relstore_blob} (zoid, tid, size, digest)
SELECT r.zoid, {finished_tid}, r.size, pg_catalog.substring($digests::bytea, 32 * r.n::integer - 31, 32)
FROM unnest($recorded_oids::bigint[], $recorded_sizes::bigint[]) WITH ORDINALITY r (zoid, size, n)

-- macro: finished_tid
pg_catalog.split_part(pg_catalog.current_setting('relstore.tid'), ' ', 1)::bigint

-- Of the C library and of libpq: SEEK_END, INV_READ.
-- macro: to_the_end
2

-- macro: to_read
262144

-- With group commit.
-- macro: wait_for_the_disk
, pg_catalog.pg_logical_emit_message(true, 'relstore', '')::text

-- Transactions -------------------------------------------------------------------------------------------------

-- The role may have another level as its default.
-- name: begin
BEGIN ISOLATION LEVEL READ COMMITTED

-- Reading ------------------------------------------------------------------------------------------------------

-- Functions, because their plans are kept: a load takes a sixth less time, a poll a third. Where statements are prepared
-- a load takes a quarter less again without.
-- name: load_at_by_function (oid, at)
SELECT state, tid, refs FROM {relstore_load_1}($oid::bigint, $at::bigint)

-- Prepared where that is safe: to plan it for a few objects takes longer than to run it.
-- For each object a probe of its own: asked as a join, PostgreSQL 15 looks for the tid first, and reads all records of
-- that transaction, which may be an import of the whole site.
-- name: load_many (oids, at, largest, first) [hp]
SELECT o.zoid, s.state, s.tid, s.refs FROM {oids} o CROSS JOIN LATERAL
    (SELECT state, tid, refs, state_size FROM {object_state} WHERE zoid = o.zoid AND tid <= $at ORDER BY tid DESC LIMIT 1) s
WHERE s.state_size <= $largest OR o.zoid = $first

-- Likewise a probe for each.
-- name: load_serials (oids, tids)
SELECT r.zoid, s.state FROM unnest($oids::bigint[], $tids::bigint[]) r (zoid, tid)
    CROSS JOIN LATERAL (SELECT state FROM {object_state} WHERE zoid = r.zoid AND tid = r.tid LIMIT 1) s

-- The two with the epoch, for a session whose server a pooler may have changed. There is always a row.
-- name: load_at_pooled (oid, at)
SELECT e.epoch, l.state, l.tid, l.refs FROM (SELECT ({epoch}) AS epoch) e
    LEFT JOIN {relstore_load_1}($oid::bigint, $at::bigint) l ON true

-- name: load_many_pooled (oids, at, largest, first) [hp]
SELECT e.epoch, m.zoid, m.state, m.tid, m.refs FROM (SELECT ({epoch}) AS epoch) e LEFT JOIN
    (SELECT o.zoid, s.state, s.tid, s.refs FROM {oids} o CROSS JOIN LATERAL
         (SELECT state, tid, refs, state_size FROM {object_state}
          WHERE zoid = o.zoid AND tid <= $at ORDER BY tid DESC LIMIT 1) s
     WHERE s.state_size <= $largest OR o.zoid = $first) m ON true

-- name: load_many_pooled (oids, at, largest, first) [hf]
SELECT e.epoch, m.zoid, m.state, m.tid, m.refs FROM (SELECT ({epoch}) AS epoch) e LEFT JOIN
    (SELECT s.zoid, s.state, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END AS refs
     FROM {oids} o JOIN {object_state} s ON s.zoid = o.zoid
     WHERE s.tid <= $at AND (s.state_size <= $largest OR s.zoid = $first)) m ON true

-- Likewise: joined, the records of a transaction are guessed to be one in 200 of the site before the first ANALYZE.
-- name: undo (tid) [hp]
SELECT u.zoid, u.md5, s.tid, s.md5, u.prev_tid,
       (SELECT max(p.tid) FROM {object_state} p WHERE p.zoid = u.zoid AND p.tid < u.tid)
FROM {object_state} u
     CROSS JOIN LATERAL (SELECT c.tid FROM {current_object} c WHERE c.zoid = u.zoid LIMIT 1) c
     CROSS JOIN LATERAL (SELECT n.tid, n.md5 FROM {object_state} n WHERE n.zoid = u.zoid AND n.tid = c.tid LIMIT 1) s
WHERE u.tid = $tid ORDER BY u.zoid

-- Likewise: joined, PostgreSQL reads all revisions there are.
-- name: current_records (oid, limit) [hp]
SELECT c.zoid, c.tid, s.state FROM {current_object} c CROSS JOIN LATERAL
    (SELECT n.state FROM {object_state} n WHERE n.zoid = c.zoid AND n.tid = c.tid LIMIT 1) s
WHERE c.zoid >= $oid AND s.state IS NOT NULL ORDER BY c.zoid LIMIT $limit

-- name: backend
SELECT pg_catalog.pg_backend_pid()

-- name: poll (since, most) [hp]
SELECT epoch, last, sweeps, stands, oids, tids FROM {relstore_poll_4}($since::bigint, $most::bigint)

-- name: poll (since, most) [hf]
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SELECT epoch, last, sweeps, stands, oids, tids FROM {relstore_poll_4}($since::bigint, $most::bigint)

-- Committing: one message for vote, one for finish. ---------------------------------------------------------------

-- name: vote (epoch, timeout, restored_tid, alone, each, at, locks, oids, tids, read_oids, read_tids, known_oids,
--     known_tids)
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT kind, zoid, tid, state
FROM {relstore_vote_6}($epoch::text, $timeout::text, $restored_tid::bigint, $alone::boolean, $each::boolean, $at::bigint, $locks::bigint[], $oids::bigint[], $tids::bigint[],
    $read_oids::bigint[], $read_tids::bigint[], $known_oids::bigint[], $known_tids::bigint[])

-- After what is large was sent ahead.
-- name: vote_staged (epoch, timeout, restored_tid, alone, each, at, locks, oids, tids, read_oids, read_tids, known_oids,
--     known_tids)
SELECT kind, zoid, tid, state
FROM {relstore_vote_6}($epoch::text, $timeout::text, $restored_tid::bigint, $alone::boolean, $each::boolean, $at::bigint, $locks::bigint[], $oids::bigint[], $tids::bigint[],
    $read_oids::bigint[], $read_tids::bigint[], $known_oids::bigint[], $known_tids::bigint[])

-- name: unstage (oids)
DELETE FROM pg_temp.relstore_stage WHERE zoid = ANY ($oids::bigint[])

-- name: stage (oids, starts, sizes, md5s, data_tids, refs_starts, refs_sizes, states, refs)
SELECT {relstore_stage_2}($oids::bigint[], $starts::integer[], $sizes::integer[], $md5s::text[], $data_tids::bigint[], $refs_starts::integer[], $refs_sizes::integer[],
    $states::bytea, $refs::bytea)

-- psycopg2 returns the last result of a message only, so the tid is carried over the COMMIT. What follows it (durable)
-- is a transaction of its own, whose commit waits until the log is on disk, ours included; only then is the message
-- answered. Many can wait for that at once, for nobody holds the commit lock any more.
-- name: finish (transaction, timeout, restored_tid, packed, username, description, extension, staged, oids, starts, sizes,
--     md5s, data_tids, refs_starts, refs_sizes, states, refs)
{call_finish};
COMMIT;
SELECT pg_catalog.current_setting('relstore.tid'){durable}

-- Copied transactions: see postgresql_copies.py. Their values are binary: eight bytes for each number.
-- name: copy_transactions [hp]
COPY {transaction} (tid, packed, username, description, extension) FROM STDIN (FORMAT binary)

-- name: copy_states [hp]
COPY {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid) FROM STDIN (FORMAT binary)

-- name: copy_states [hf]
COPY {object_state} (zoid, tid, state_size, state, refs, refs_tid) FROM STDIN (FORMAT binary)

-- name: copy_current [hp]
COPY {current_object} (zoid, tid) FROM STDIN (FORMAT binary)

-- A pack of RelStorage's may have removed some just now.
-- name: point_many (oids, tids) [hp]
INSERT INTO {current_object} (zoid, tid)
SELECT n.zoid, n.tid FROM unnest($oids::bigint[], $tids::bigint[]) n (zoid, tid)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid

-- name: begin_replacing [hf]
CREATE TEMPORARY TABLE relstore_replacing
    (zoid bigint, tid bigint, state_size bigint, state bytea, refs bytea, refs_tid bigint) ON COMMIT DROP

-- name: copy_replacing [hf]
COPY pg_temp.relstore_replacing (zoid, tid, state_size, state, refs, refs_tid) FROM STDIN (FORMAT binary)

-- name: replace_copied [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
SELECT zoid, tid, state_size, state, refs, refs_tid FROM pg_temp.relstore_replacing
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, state_size = excluded.state_size, state = excluded.state,
    refs = excluded.refs, refs_tid = excluded.refs_tid

-- name: largest_object
SELECT coalesce(max(zoid), -1) FROM {current}

-- Blobs: see postgresql_blobs.py -----------------------------------------------------------------------------------

-- Makes a large object of each piece.
-- name: new_chunks (starts, sizes, data)
SELECT r.n, pg_catalog.lo_from_bytea(0::oid, pg_catalog.substring($data::bytea, r.start + 1, r.size))
FROM unnest($starts::integer[], $sizes::integer[]) WITH ORDINALITY r (start, size, n)

-- name: begin_with_chunks (starts, sizes, data)
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT r.n, pg_catalog.lo_from_bytea(0::oid, pg_catalog.substring($data::bytea, r.start + 1, r.size))
FROM unnest($starts::integer[], $sizes::integer[]) WITH ORDINALITY r (start, size, n)

-- name: continue_chunk (chunk, start, data)
SELECT pg_catalog.lo_put($chunk::oid, $start::bigint, $data::bytea)

-- Keeps a pack from what is repeated. Then returns what has gone before.
-- name: lock_copied (oids, tids) [hp]
SELECT b.zoid FROM unnest($oids::bigint[], $tids::bigint[]) c (zoid, tid)
    JOIN {blob_chunk} b ON b.zoid = c.zoid AND b.tid = c.tid ORDER BY b.zoid FOR KEY SHARE OF b;
SELECT c.zoid FROM unnest($oids::bigint[], $tids::bigint[]) c (zoid, tid)
WHERE NOT EXISTS (SELECT FROM {object_state} s WHERE s.zoid = c.zoid AND s.tid = c.tid)

-- As finish. The large objects are made before the commit lock is taken, unless they were sent ahead.
-- name: finish_with_blobs (transaction, timeout, restored_tid, packed, username, description, extension, staged, oids,
--     starts, sizes, md5s, data_tids, refs_starts, refs_sizes, states, refs, blob_oids, chunks, blob_starts, blob_sizes,
--     data, recorded_oids, recorded_sizes, digests, copied_oids, copied_tids, repeated_oids, repeated_tids) [hp]
{make_chunks};
{call_finish};
{insert_chunks}
UNION ALL SELECT b.zoid, {finished_tid}, b.chunk_num, b.chunk
FROM unnest($copied_oids::bigint[], $copied_tids::bigint[]) c (zoid, tid)
     JOIN {blob_chunk} b ON b.zoid = c.zoid AND b.tid = c.tid;
{insert_records}
UNION ALL SELECT b.zoid, {finished_tid}, b.size, b.digest
FROM unnest($repeated_oids::bigint[], $repeated_tids::bigint[]) c (zoid, tid)
     JOIN {relstore_blob} b ON b.zoid = c.zoid AND b.tid = c.tid;
COMMIT;
SELECT pg_catalog.current_setting('relstore.tid'){durable}

-- name: finish_with_blobs (transaction, timeout, restored_tid, packed, username, description, extension, staged, oids,
--     starts, sizes, md5s, data_tids, refs_starts, refs_sizes, states, refs, blob_oids, chunks, blob_starts, blob_sizes,
--     data, recorded_oids, recorded_sizes, digests, removed_oids) [hf]
{make_chunks};
DELETE FROM {blob_chunk} WHERE zoid = ANY ($removed_oids::bigint[]);
{call_finish};
{insert_chunks};
DELETE FROM {relstore_blob} WHERE zoid = ANY ($removed_oids::bigint[]);
{insert_records};
COMMIT;
SELECT pg_catalog.current_setting('relstore.tid'){durable}

-- A commit has written the row of the state before it looks for what is recorded: so one of the two waits for the other.
-- name: add_record (size, digest, oid, tid) [hf]
INSERT INTO {relstore_blob} (zoid, tid, size, digest)
SELECT s.zoid, s.tid, $size::bigint, $digest::bytea FROM {object_state} s WHERE s.zoid = $oid AND s.tid = $tid FOR UPDATE OF s
ON CONFLICT DO NOTHING

-- name: add_record (size, digest, oid, tid) [hp]
INSERT INTO {relstore_blob} (zoid, tid, size, digest)
SELECT s.zoid, s.tid, $size::bigint, $digest::bytea FROM {object_state} s WHERE s.zoid = $oid AND s.tid = $tid
ON CONFLICT DO NOTHING

-- name: choose_tid (timeout)
SELECT tid, waited FROM {relstore_choose_1}($timeout::text)

-- A row and its large object are seen as of one moment, so that one without the other was left so. Of an object that is
-- not there nothing is asked: the error would end the transaction.
-- name: chunks (oid, tid, size)
SELECT b.chunk_num, CASE WHEN m.oid IS NULL THEN NULL WHEN b.chunk_num > 0 THEN ''::bytea
                         ELSE pg_catalog.lo_get(b.chunk, 0::bigint, $size::integer) END, r.size, r.digest
FROM {blob_chunk} b LEFT JOIN LATERAL (SELECT oid FROM pg_largeobject_metadata WHERE oid = b.chunk LIMIT 1) m ON true
     LEFT JOIN {relstore_blob} r ON r.zoid = b.zoid AND r.tid = b.tid
WHERE b.zoid = $oid AND b.tid = $tid ORDER BY b.chunk_num

-- name: chunk_piece (oid, tid, number, start, size)
SELECT pg_catalog.lo_get(b.chunk, $start::bigint, $size::integer)
FROM {blob_chunk} b CROSS JOIN LATERAL (SELECT oid FROM pg_largeobject_metadata WHERE oid = b.chunk LIMIT 1) m
WHERE b.zoid = $oid AND b.tid = $tid AND b.chunk_num = $number

-- A descriptor lasts as long as a transaction, which may be that of a view. With OFFSET none is closed before it was used.
-- name: blob_size (oid, tid)
SELECT count(*), sum(f.size)::bigint
FROM (SELECT o.fd, pg_catalog.lo_lseek64(o.fd, 0::bigint, {to_the_end}) AS size
      FROM (SELECT pg_catalog.lo_open(b.chunk, {to_read}) AS fd
            FROM {blob_chunk} b CROSS JOIN LATERAL (SELECT oid FROM pg_largeobject_metadata WHERE oid = b.chunk LIMIT 1) m
            WHERE b.zoid = $oid AND b.tid = $tid) o OFFSET 0) f
WHERE pg_catalog.lo_close(f.fd) = 0

-- Both at once, for a pooler may change the server after any statement; and a recovered one has never heard of a
-- transaction that it has lost, which is an error.
-- name: transaction_status (transaction, epoch)
SELECT n.still, CASE WHEN n.still THEN pg_catalog.pg_xact_status($transaction::text::xid8) END
FROM (SELECT ({epoch}) IS NOT DISTINCT FROM $epoch AS still) n

-- name: epoch_transaction
SELECT xmin::text::bigint FROM {relstore_epoch}

-- name: terminate (pid)
SELECT pg_catalog.pg_terminate_backend($pid)

-- Waits for the log on disk, ours included: what was asked about must not be lost after it was answered.
-- name: make_durable
SELECT pg_catalog.pg_logical_emit_message(true, 'relstore', '')

-- name: tid_of (since, transaction) [hp]
SELECT min(tid) FROM {transaction} WHERE tid > $since AND xmin = $transaction::text::xid8::xid

-- name: tid_of (since, transaction) [hf]
SELECT min(tid) FROM {object_state} WHERE tid > $since AND xmin = $transaction::text::xid8::xid

-- name: new_oids (count)
SELECT pg_catalog.nextval('{zoid_seq}') FROM pg_catalog.generate_series(1, $count)

-- The largest oid, if the sequence has not come so far. To look takes no lock: it never goes back.
-- name: oid_ahead
SELECT c.zoid FROM (SELECT max(zoid) AS zoid FROM {current}) c, {zoid_seq} s
WHERE c.zoid > 0 AND (c.zoid - 1) / 16 >= CASE WHEN s.is_called THEN s.last_value ELSE 0 END

-- name: reserve_oids (block)
SELECT {relstore_reserve_3}($block::bigint)

-- Packing ------------------------------------------------------------------------------------------------------

-- Nothing ends it but its end. Which of these settings there are depends on the server's version.
-- name: begin_snapshot
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SELECT pg_catalog.set_config(name, '0', true) FROM pg_settings
WHERE name IN ('statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')

-- All of it is wanted, in whatever order it is read fastest.
-- name: open_revisions
SET LOCAL cursor_tuple_fraction = 1;
DECLARE relstore_revisions NO SCROLL CURSOR FOR
SELECT {revision}
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid

-- name: open_revisions_only
SET LOCAL cursor_tuple_fraction = 1;
DECLARE relstore_revisions NO SCROLL CURSOR FOR
SELECT zoid, tid, NULL, NULL, state IS NULL FROM {object_state}

-- name: next_revisions
FETCH 1000 FROM relstore_revisions

-- name: save_references (refs, oids, tids, starts, sizes) [hp]
INSERT INTO {relstore_refs} (zoid, tid, refs)
SELECT r.zoid, r.tid, pg_catalog.substring($refs::bytea, r.start + 1, r.size)
FROM unnest($oids::bigint[], $tids::bigint[], $starts::integer[], $sizes::integer[]) r (zoid, tid, start, size)
ON CONFLICT (zoid, tid) DO NOTHING

-- name: save_references (refs, oids, tids, starts, sizes) [hf]
INSERT INTO {relstore_refs} (zoid, tid, refs)
SELECT r.zoid, r.tid, pg_catalog.substring($refs::bytea, r.start + 1, r.size)
FROM unnest($oids::bigint[], $tids::bigint[], $starts::integer[], $sizes::integer[]) r (zoid, tid, start, size)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, refs = excluded.refs

-- name: add_garbage (pack_ids, oids, tids, sinces, goes)
INSERT INTO {relstore_garbage} (pack_id, zoid, tid, since, goes)
SELECT * FROM unnest($pack_ids::bigint[], $oids::bigint[], $tids::bigint[], $sinces::bigint[], $goes::bigint[])

-- Likewise.
-- name: missing (oids) [hp]
SELECT o.zoid FROM {oids} o LEFT JOIN LATERAL (SELECT tid FROM {current_object} WHERE zoid = o.zoid LIMIT 1) c ON true
    LEFT JOIN LATERAL (SELECT state FROM {object_state} WHERE zoid = o.zoid AND tid = c.tid LIMIT 1) s ON true
WHERE s.state IS NULL LIMIT 100

-- name: missing (oids) [hf]
SELECT o.zoid FROM {oids} o
    LEFT JOIN LATERAL (SELECT state FROM {object_state} WHERE zoid = o.zoid LIMIT 1) s ON true
WHERE s.state IS NULL LIMIT 100

-- Likewise.
-- name: current_tids (oids)
SELECT o.zoid, c.tid FROM {oids} o LEFT JOIN LATERAL (SELECT tid FROM {current} WHERE zoid = o.zoid LIMIT 1) c ON true

-- name: spare (oids, pack_id)
UPDATE {relstore_garbage} SET goes = {goes_spared} WHERE zoid = ANY ($oids::bigint[]) AND pack_id = $pack_id

-- name: forget_garbage (pack_id, keep)
DELETE FROM {relstore_garbage} WHERE ctid = ANY (ARRAY(
    SELECT g.ctid FROM {relstore_garbage} g WHERE pg_catalog.abs(g.pack_id) NOT IN ($pack_id, $keep)
        AND pg_catalog.abs(g.pack_id) NOT IN (SELECT sweeping FROM {relstore_sweep}) LIMIT 10000))

-- Likewise.
-- name: garbage_sizes (revisions) [hp]
SELECT s.zoid, g.states, g.bytes, s.tid, {if_small}
FROM {revisions} r
     CROSS JOIN LATERAL (SELECT r.zoid, count(*) AS states, sum(n.state_size)::bigint AS bytes, max(n.tid) AS tid
                         FROM {object_state} n WHERE n.zoid = r.zoid AND n.tid <= r.tid) g
     {state_of_g}

-- name: garbage_blobs (revisions) [hp]
SELECT coalesce(sum(b.blobs), 0)::bigint, coalesce(sum(b.bytes), 0)::bigint
FROM {revisions} g
     CROSS JOIN LATERAL (SELECT count(*) AS blobs, sum(r.size) AS bytes
                         FROM {relstore_blob} r WHERE r.zoid = g.zoid AND r.tid <= g.tid) b

-- name: garbage_blobs (revisions) [hf]
SELECT coalesce(sum(b.blobs), 0)::bigint, coalesce(sum(b.bytes), 0)::bigint
FROM {revisions} g
     CROSS JOIN LATERAL (SELECT count(*) AS blobs, sum(r.size) AS bytes
                         FROM {relstore_blob} r WHERE r.zoid = g.zoid AND r.tid = g.tid) b

-- A lock of the session, which is RelStorage's too.
-- name: lock_pack
SELECT pg_catalog.pg_try_advisory_lock({key}({pack_lock}::bigint))

-- name: lock_key (key)
SELECT {key}($key::bigint)

-- name: lock_holders (key)
SELECT l.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''), 'from ' || pg_catalog.host(a.client_addr),
                            'connected since ' || pg_catalog.to_char(a.backend_start AT TIME ZONE 'UTC',
                                                                     'YYYY-MM-DD HH24:MI:SS UTC'))
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid <> pg_catalog.pg_backend_pid()
      AND l.classid::bigint = $key::bigint >> 32 & 4294967295 AND l.objid::bigint = $key::bigint & 4294967295
      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = pg_catalog.current_database())
ORDER BY a.xact_start NULLS LAST LIMIT 3

-- Who keeps a process waiting; those who wait themselves come last. A prepared transaction has no process.
-- name: blockers (pid)
SELECT b.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''), 'from ' || pg_catalog.host(a.client_addr),
                            'connected since ' || pg_catalog.to_char(a.backend_start AT TIME ZONE 'UTC',
                                                                     'YYYY-MM-DD HH24:MI:SS UTC'))
FROM (SELECT DISTINCT pg_catalog.unnest(pg_catalog.pg_blocking_pids($pid)) AS pid) b
     LEFT JOIN pg_stat_activity a ON a.pid = b.pid
ORDER BY a.wait_event_type IS NOT DISTINCT FROM 'Lock', a.xact_start LIMIT 3

-- A session that has the lock may be idle; before 14 it may anyway.
-- name: stay
SELECT pg_catalog.set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'

-- Keep out whoever is between vote and finish.
-- name: lock_votes (timeout)
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT pg_catalog.set_config('lock_timeout', $timeout, true), pg_catalog.pg_advisory_xact_lock({key}({everybody}::bigint))

-- name: keep_votes_out
LOCK TABLE {relstore_sweep} IN ACCESS EXCLUSIVE MODE

-- name: sweep (pack_id, oid, upto_oid)
SELECT states, bytes, blobs, blob_bytes FROM {relstore_sweep_4}($pack_id::bigint, $oid::bigint, $upto_oid::bigint)

-- name: forget_transactions (tid, upto_tid, named) [hp]
SELECT {relstore_forget_3}($tid::bigint, $upto_tid::bigint, $named::boolean)

-- name: has_foreign_key [hp]
SELECT count(*) FROM pg_constraint WHERE conrelid = '{object_state}'::regclass::oid AND contype = 'f'

-- Administration -----------------------------------------------------------------------------------------------

-- Without keeping commits out, however large the table.
-- name: index_for_relstorage [hp]
CREATE INDEX CONCURRENTLY IF NOT EXISTS current_object_tid ON {current_object} (tid)

-- name: broken_index [hp]
SELECT 1 FROM pg_index WHERE indexrelid = pg_catalog.to_regclass('{current_object_tid}')::oid AND NOT indisvalid

-- name: drop_broken_index [hp]
DROP INDEX CONCURRENTLY IF EXISTS {current_object_tid}

-- name: max_locks
SELECT pg_catalog.current_setting('max_locks_per_transaction')

-- name: server
SELECT pg_catalog.current_setting('server_version_num')::integer, pg_catalog.current_database(),
       pg_catalog.current_schema(), pg_catalog.current_setting('server_version'), pg_catalog.pg_is_in_recovery()

-- What the owner of a role or a database may have set, and no statement can do with: (name, value, what it has to be).
-- name: wrong_settings
SELECT name, pg_catalog.current_setting(name), needed
FROM (VALUES ('array_nulls', 'on'), ('default_transaction_read_only', 'off')) s (name, needed)
WHERE pg_catalog.current_setting(name) <> needed

-- name: schema_exists (schema)
SELECT 1 FROM pg_namespace WHERE nspname = $schema

-- Of the rights that a user needs, those that are missing, by number: kinds and names of objects, and the privileges. By
-- the oids of objects, because who may not use the schema may not name what is in it. What is not there is left out.
-- name: missing_rights (schema, kinds, names, privileges)
SELECT w.number
FROM (SELECT oid FROM pg_namespace WHERE nspname = $schema) s
     CROSS JOIN unnest($kinds::text[], $names::text[], $privileges::text[]) WITH ORDINALITY w (kind, name, privilege, number)
     LEFT JOIN pg_class c ON c.relnamespace = s.oid AND c.relname = w.name::name AND w.kind IN ('TABLE', 'SEQUENCE')
WHERE NOT CASE w.kind
    WHEN 'DATABASE' THEN pg_catalog.has_database_privilege(pg_catalog.current_database(), w.privilege)
    WHEN 'SCHEMA' THEN pg_catalog.has_schema_privilege(s.oid, w.privilege)
    WHEN 'SEQUENCE' THEN pg_catalog.has_sequence_privilege(c.oid, w.privilege)
    WHEN 'FUNCTION' THEN (SELECT pg_catalog.bool_and(pg_catalog.has_function_privilege(p.oid, w.privilege))
                          FROM pg_proc p WHERE p.pronamespace = s.oid AND p.proname = w.name::name)
    ELSE pg_catalog.has_table_privilege(c.oid, w.privilege) END
ORDER BY w.number

-- name: current_user
SELECT current_user

-- What is wrong with what has a name of ours, as (what is wrong, what it is, whose): its owner, see ownership.py; or it is
-- a function, and none of that name takes these types, which a setting (quote_all_identifiers) puts in quotes. Or that
-- functions of others hide those of the server.
-- name: strangers (schema, names, functions, types)
WITH space AS (SELECT n.oid, n.nspowner FROM pg_namespace n WHERE n.nspname = $schema),
     ours AS (SELECT $names::name[] AS names),
     found AS (
        SELECT CASE c.relkind WHEN 'S' THEN 'sequence ' WHEN 'v' THEN 'view ' WHEN 'i' THEN 'index ' ELSE 'table ' END
               || c.relname::text AS what, c.relowner AS owner
        FROM pg_class c JOIN space ON space.oid = c.relnamespace CROSS JOIN ours WHERE c.relname = ANY (ours.names)
        UNION ALL
        SELECT 'function ' || p.proname::text || '(' || pg_catalog.oidvectortypes(p.proargtypes) || ')', p.proowner
        FROM pg_proc p JOIN space ON space.oid = p.pronamespace CROSS JOIN ours WHERE p.proname = ANY (ours.names)
        UNION ALL
        SELECT 'trigger ' || t.tgname::text || ' with the function ' || p.proname::text, p.proowner
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN space ON space.oid = c.relnamespace
             JOIN pg_proc p ON p.oid = t.tgfoid CROSS JOIN ours
        WHERE t.tgname = ANY (ours.names) AND NOT t.tgisinternal),
     trusted AS (
        SELECT space.nspowner AS role FROM space
        UNION ALL SELECT r.oid FROM pg_roles r WHERE r.rolname = current_user
        UNION ALL SELECT c.relowner FROM pg_class c JOIN space ON space.oid = c.relnamespace
                  WHERE c.relname = 'object_state' AND c.relkind IN ('r', 'p'))
SELECT 'owner', f.what, pg_catalog.pg_get_userbyid(f.owner)::text FROM found f
WHERE NOT EXISTS (SELECT FROM trusted WHERE pg_catalog.pg_has_role(f.owner, trusted.role, 'MEMBER'))
UNION ALL
SELECT 'types', p.proname::text || '(' || pg_catalog.oidvectortypes(p.proargtypes) || ')',
       pg_catalog.pg_get_userbyid(p.proowner)::text
FROM unnest($functions::name[], $types::text[]) w (name, types) CROSS JOIN space
     JOIN pg_proc p ON p.pronamespace = space.oid AND p.proname = w.name
WHERE NOT EXISTS (SELECT FROM pg_proc o WHERE o.pronamespace = space.oid AND o.proname = w.name
                      AND pg_catalog.replace(pg_catalog.oidvectortypes(o.proargtypes), '"'::text, ''::text) = w.types)
UNION ALL
SELECT 'path', p.first::text, NULL
FROM (SELECT s.name AS first FROM pg_catalog.unnest(pg_catalog.current_schemas(true)) WITH ORDINALITY s (name, number)
      WHERE NOT pg_catalog.starts_with(s.name::text, 'pg_temp'::text) ORDER BY s.number LIMIT 1) p
WHERE p.first <> 'pg_catalog'

-- name: relations (schema)
SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $schema)
UNION ALL SELECT proname FROM pg_proc WHERE pg_catalog.starts_with(proname::text, 'relstore'::text)
    AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = $schema)
UNION ALL SELECT tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
    WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $schema)
          AND relname = 'blob_chunk' AND NOT tgisinternal

-- name: columns (schema)
SELECT c.relname, a.attname, pg_catalog.format_type(a.atttypid, NULL)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $schema)
      AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND a.attnum > 0 AND NOT a.attisdropped

-- Changing the schema ------------------------------------------------------------------------------------------

-- Not by {key}, which this is about to create.
-- name: lock_schema
SELECT pg_catalog.pg_try_advisory_xact_lock({schema_lock})

-- The pauses between tries are in it. The text of a function is looked at when it is made, in this search path.
-- name: stay_in_transaction
SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true),
       pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)

-- name: begin_try
SAVEPOINT relstore_try

-- name: undo_try
ROLLBACK TO SAVEPOINT relstore_try

-- name: be_impatient (timeout)
SELECT pg_catalog.set_config('lock_timeout', $timeout, true), pg_catalog.set_config('statement_timeout', '0', true)

-- name: end_after (timeout)
SELECT pg_catalog.set_config('statement_timeout', $timeout, true)

-- Of the session: for a statement that cannot be in a transaction.
-- name: end_with_client
SELECT pg_catalog.set_config('statement_timeout', '0', false), pg_catalog.set_config('lock_timeout', '0', false),
       pg_catalog.set_config('client_connection_check_interval', '2s', false)

-- name: end_soon
SELECT pg_catalog.set_config('statement_timeout', '0', false), pg_catalog.set_config('lock_timeout', '10s', false)

-- Who uses a table since before the last try: what else there is has begun while it waited. A prepared transaction has no
-- process.
-- name: table_holders (schema, table, readers, seconds)
SELECT l.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''), a.usename,
           'from ' || pg_catalog.host(a.client_addr),
           nullif(a.backend_type, 'client backend'),
           a.state || ' since ' || pg_catalog.to_char(a.state_change AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),
           'in a transaction since ' || pg_catalog.to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),
           'at ' || pg_catalog.quote_literal(pg_catalog.left(pg_catalog.regexp_replace(a.query, '\s+', ' ', 'g'), 60)))
FROM (SELECT DISTINCT k.pid FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
      WHERE k.granted AND k.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
            AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $schema) AND c.relname = $table
            AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = pg_catalog.current_database())
            AND ($readers OR k.mode NOT IN ('AccessShareLock', 'RowShareLock'))) l
     LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE a.xact_start IS NULL OR a.xact_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => $seconds)
ORDER BY a.xact_start NULLS LAST LIMIT 3

-- name: size (schema)
SELECT coalesce(sum(pg_catalog.pg_total_relation_size(oid)), 0)::bigint FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = $schema) AND relkind = 'r'

-- name: estimated_count [hp]
SELECT reltuples::bigint FROM pg_class WHERE oid = '{current_object}'::regclass::oid

-- name: estimated_count [hf]
SELECT reltuples::bigint FROM pg_class WHERE oid = '{object_state}'::regclass::oid

-- name: zap [hp]
LOCK TABLE {blob_chunk}, {relstore_blob}, {current_object}, {object_state}, {transaction}, {object_ref}, {object_refs_added}, {pack_object},
    {pack_state}, {pack_state_tid}, {relstore_refs}, {relstore_garbage}, {relstore_pack} IN ACCESS EXCLUSIVE MODE;
SELECT pg_catalog.count(pg_catalog.lo_unlink(m.oid)) FROM pg_largeobject_metadata m
WHERE m.oid IN (SELECT chunk FROM {blob_chunk});
TRUNCATE {blob_chunk}, {relstore_blob}, {current_object}, {object_state}, {transaction}, {object_ref}, {object_refs_added}, {pack_object},
    {pack_state}, {pack_state_tid}, {relstore_refs}, {relstore_garbage}, {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, sweeping = 0, packed_to = 0, deleted = 0;
INSERT INTO {transaction} (tid, username, description)
VALUES (0, CAST('system' AS {bytes}), CAST('special transaction for object creation' AS {bytes}));
DELETE FROM {relstore_epoch};
ALTER SEQUENCE {zoid_seq} RESTART

-- name: zap [hf]
LOCK TABLE {blob_chunk}, {relstore_blob}, {object_state}, {object_ref}, {object_refs_added}, {pack_object},
    {relstore_refs}, {relstore_garbage}, {relstore_pack} IN ACCESS EXCLUSIVE MODE;
SELECT pg_catalog.count(pg_catalog.lo_unlink(m.oid)) FROM pg_largeobject_metadata m
WHERE m.oid IN (SELECT chunk FROM {blob_chunk});
TRUNCATE {blob_chunk}, {relstore_blob}, {object_state}, {object_ref}, {object_refs_added}, {pack_object},
    {relstore_refs}, {relstore_garbage}, {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, sweeping = 0, packed_to = 0, deleted = 0;
DELETE FROM {relstore_epoch};
ALTER SEQUENCE {zoid_seq} RESTART

-- So that it is not replaced meanwhile.
-- name: lock_revision (oid, tid) [hf]
SELECT zoid FROM {object_state} WHERE zoid = $oid AND tid = $tid FOR UPDATE
