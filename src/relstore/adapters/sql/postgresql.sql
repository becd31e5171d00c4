-- What PostgreSQL says otherwise.

-- Reading ------------------------------------------------------------------------------------------------------

-- Functions, because their plans are kept: a load takes a sixth less time, a poll a third. Where statements are prepared
-- a load takes a quarter less again without.
-- name: load_at_by_function
SELECT state, tid, refs FROM {relstore_load_1}(?::bigint, ?::bigint)

-- Prepared where that is safe: to plan it for a few objects takes longer than to run it.
-- For each object a probe of its own: asked as a join, PostgreSQL 15 looks for the tid first, and reads all records of
-- that transaction, which may be an import of the whole site.
-- name: load_many [hp]
SELECT o.zoid, s.state, s.tid, s.refs FROM {oids} o CROSS JOIN LATERAL
    (SELECT state, tid, refs, state_size FROM {object_state} WHERE zoid = o.zoid AND tid <= ? ORDER BY tid DESC LIMIT 1) s
WHERE s.state_size <= ? OR o.zoid = ?

-- Likewise a probe for each.
-- name: load_serials
SELECT r.zoid, s.state FROM unnest(?::bigint[], ?::bigint[]) r (zoid, tid)
    CROSS JOIN LATERAL (SELECT state FROM {object_state} WHERE zoid = r.zoid AND tid = r.tid LIMIT 1) s

-- The two with the epoch, for a session whose server a pooler may have changed. There is always a row.
-- name: load_at_pooled
SELECT e.epoch, l.state, l.tid, l.refs FROM (SELECT ({epoch}) AS epoch) e
    LEFT JOIN {relstore_load_1}(?::bigint, ?::bigint) l ON true

-- name: load_many_pooled [hp]
SELECT e.epoch, m.zoid, m.state, m.tid, m.refs FROM (SELECT ({epoch}) AS epoch) e LEFT JOIN
    (SELECT o.zoid, s.state, s.tid, s.refs FROM {oids} o CROSS JOIN LATERAL
         (SELECT state, tid, refs, state_size FROM {object_state}
          WHERE zoid = o.zoid AND tid <= ? ORDER BY tid DESC LIMIT 1) s
     WHERE s.state_size <= ? OR o.zoid = ?) m ON true

-- name: load_many_pooled [hf]
SELECT e.epoch, m.zoid, m.state, m.tid, m.refs FROM (SELECT ({epoch}) AS epoch) e LEFT JOIN
    (SELECT s.zoid, s.state, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END AS refs
     FROM {oids} o JOIN {object_state} s ON s.zoid = o.zoid
     WHERE s.tid <= ? AND (s.state_size <= ? OR s.zoid = ?)) m ON true

-- Likewise: joined, the records of a transaction are guessed to be one in 200 of the site before the first ANALYZE.
-- name: undo [hp]
SELECT u.zoid, u.md5, s.tid, s.md5, u.prev_tid,
       (SELECT max(p.tid) FROM {object_state} p WHERE p.zoid = u.zoid AND p.tid < u.tid)
FROM {object_state} u
     CROSS JOIN LATERAL (SELECT c.tid FROM {current_object} c WHERE c.zoid = u.zoid LIMIT 1) c
     CROSS JOIN LATERAL (SELECT n.tid, n.md5 FROM {object_state} n WHERE n.zoid = u.zoid AND n.tid = c.tid LIMIT 1) s
WHERE u.tid = ? ORDER BY u.zoid

-- Likewise: joined, PostgreSQL reads all revisions there are.
-- name: current_records [hp]
SELECT c.zoid, c.tid, s.state FROM {current_object} c CROSS JOIN LATERAL
    (SELECT n.state FROM {object_state} n WHERE n.zoid = c.zoid AND n.tid = c.tid LIMIT 1) s
WHERE c.zoid >= ? AND c.zoid >= ? AND s.state IS NOT NULL ORDER BY c.zoid LIMIT ?

-- name: backend
SELECT pg_catalog.pg_backend_pid()

-- name: poll [hp]
SELECT epoch, last, sweeps, stands, oids, tids FROM {relstore_poll_3}(?::bigint, ?::bigint)

-- name: poll [hf]
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SELECT epoch, last, sweeps, stands, oids, tids FROM {relstore_poll_3}(?::bigint, ?::bigint)

-- Committing: one message for vote, one for finish. ---------------------------------------------------------------

-- name: vote
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT kind, zoid, tid, state
FROM {relstore_vote_4}(?::text, ?::text, ?::bigint, ?::boolean, ?::bigint, ?::bigint[], ?::bigint[], ?::bigint[],
    ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[])

-- After what is large was sent ahead.
-- name: vote_staged
SELECT kind, zoid, tid, state
FROM {relstore_vote_4}(?::text, ?::text, ?::bigint, ?::boolean, ?::bigint, ?::bigint[], ?::bigint[], ?::bigint[],
    ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[])

-- name: begin_vote
BEGIN ISOLATION LEVEL READ COMMITTED

-- name: unstage
DELETE FROM pg_temp.relstore_stage WHERE zoid = ANY (?::bigint[])

-- name: stage
SELECT {relstore_stage_2}(?::bigint[], ?::integer[], ?::integer[], ?::text[], ?::bigint[], ?::integer[], ?::integer[],
    ?::bytea, ?::bytea)

-- psycopg2 returns the last result of a message only, so the tid is carried over the COMMIT. What follows it (durable)
-- is a transaction of its own, whose commit waits until the log is on disk, ours included; only then is the message
-- answered. Many can wait for that at once, for nobody holds the commit lock any more.
-- name: finish
SELECT pg_catalog.set_config('relstore.tid', {relstore_finish_3}(
    ?::bigint, ?::text, {group}, ?::bigint, ?::boolean, ?::bytea, ?::bytea, ?::bytea, ?::boolean,
    ?::bigint[], ?::integer[], ?::integer[], ?::text[], ?::bigint[], ?::integer[], ?::integer[],
    ?::bytea, ?::bytea), false);
COMMIT;
SELECT pg_catalog.current_setting('relstore.tid'){durable}

-- Both at once, for a pooler may change the server after any statement; and a recovered one has never heard of a
-- transaction that it has lost, which is an error.
-- name: transaction_status
SELECT n.still, CASE WHEN n.still THEN pg_catalog.pg_xact_status(?::text::xid8) END
FROM (SELECT ({epoch}) IS NOT DISTINCT FROM ? AS still) n

-- name: epoch_transaction
SELECT xmin::text::bigint FROM {relstore_epoch}

-- name: terminate
SELECT pg_catalog.pg_terminate_backend(?)

-- Waits for the log on disk, ours included: what was asked about must not be lost after it was answered.
-- name: make_durable
SELECT pg_catalog.pg_logical_emit_message(true, 'relstore', '')

-- name: tid_of [hp]
SELECT min(tid) FROM {transaction} WHERE tid > ? AND xmin = ?::text::xid8::xid

-- name: tid_of [hf]
SELECT min(tid) FROM {object_state} WHERE tid > ? AND xmin = ?::text::xid8::xid

-- name: new_oids
SELECT pg_catalog.nextval('{zoid_seq}') FROM pg_catalog.generate_series(1, ?)

-- The largest oid, if the sequence has not come so far. To look takes no lock: it never goes back.
-- name: oid_ahead
SELECT c.zoid FROM (SELECT max(zoid) AS zoid FROM {current}) c, {zoid_seq} s
WHERE c.zoid > 0 AND (c.zoid - 1) / 16 >= CASE WHEN s.is_called THEN s.last_value ELSE 0 END

-- name: reserve_oids
SELECT {relstore_reserve_2}(?::bigint)

-- Packing ------------------------------------------------------------------------------------------------------

-- Nothing ends it but its end. Which of these settings there are depends on the server's version.
-- name: begin_snapshot
BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY;
SELECT pg_catalog.set_config(name, '0', true) FROM pg_settings
WHERE name IN ('statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout')

-- All of it is wanted, in whatever order it is read fastest.
-- name: open_revisions [hp]
SET LOCAL cursor_tuple_fraction = 1;
DECLARE relstore_revisions NO SCROLL CURSOR FOR
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid

-- name: open_revisions [hf]
SET LOCAL cursor_tuple_fraction = 1;
DECLARE relstore_revisions NO SCROLL CURSOR FOR
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid

-- name: open_revisions_only
SET LOCAL cursor_tuple_fraction = 1;
DECLARE relstore_revisions NO SCROLL CURSOR FOR
SELECT zoid, tid, NULL, NULL, state IS NULL FROM {object_state}

-- name: next_revisions
FETCH 1000 FROM relstore_revisions

-- For each object a probe of its own, whatever the statistics say.
-- name: changes [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {object_state} s LEFT JOIN LATERAL
     (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true
WHERE (s.tid, s.zoid) > (?, ?) ORDER BY s.tid, s.zoid LIMIT ?

-- name: changes [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM {object_state} s LEFT JOIN LATERAL
     (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true
WHERE (s.tid, s.zoid) > (?, ?) ORDER BY s.tid, s.zoid LIMIT ?

-- Likewise.
-- name: garbage_revisions [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, (SELECT r.refs FROM {relstore_refs} r WHERE r.zoid = s.zoid AND r.tid = s.tid)),
       CASE WHEN s.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {oids} o CROSS JOIN LATERAL
     (SELECT tid FROM {relstore_garbage} WHERE generation = ? AND zoid = o.zoid LIMIT 1) g CROSS JOIN LATERAL
     (SELECT * FROM {object_state} WHERE zoid = o.zoid AND tid = g.tid LIMIT 1) s

-- name: garbage_revisions [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END,
                               (SELECT r.refs FROM {relstore_refs} r WHERE r.zoid = s.zoid AND r.tid = s.tid)),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {oids} o CROSS JOIN LATERAL
     (SELECT tid FROM {relstore_garbage} WHERE generation = ? AND zoid = o.zoid LIMIT 1) g CROSS JOIN LATERAL
     (SELECT * FROM {object_state} WHERE zoid = o.zoid AND tid = g.tid LIMIT 1) s

-- name: current_revisions [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, (SELECT r.refs FROM {relstore_refs} r WHERE r.zoid = s.zoid AND r.tid = s.tid)),
       CASE WHEN s.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {oids} o CROSS JOIN LATERAL
     (SELECT tid FROM {current_object} WHERE zoid = o.zoid LIMIT 1) c CROSS JOIN LATERAL
     (SELECT * FROM {object_state} WHERE zoid = o.zoid AND tid = c.tid LIMIT 1) s

-- name: current_revisions [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END,
                               (SELECT r.refs FROM {relstore_refs} r WHERE r.zoid = s.zoid AND r.tid = s.tid)),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {oids} o CROSS JOIN LATERAL (SELECT * FROM {object_state} WHERE zoid = o.zoid LIMIT 1) s

-- name: save_references [hp]
INSERT INTO {relstore_refs} (zoid, tid, refs)
SELECT r.zoid, r.tid, pg_catalog.substring(?::bytea, r.start + 1, r.size)
FROM unnest(?::bigint[], ?::bigint[], ?::integer[], ?::integer[]) r (zoid, tid, start, size)
ON CONFLICT (zoid, tid) DO NOTHING

-- name: save_references [hf]
INSERT INTO {relstore_refs} (zoid, tid, refs)
SELECT r.zoid, r.tid, pg_catalog.substring(?::bytea, r.start + 1, r.size)
FROM unnest(?::bigint[], ?::bigint[], ?::integer[], ?::integer[]) r (zoid, tid, start, size)
ON CONFLICT (zoid) DO UPDATE SET tid = excluded.tid, refs = excluded.refs

-- name: add_garbage
INSERT INTO {relstore_garbage} (generation, zoid, tid, since, goes)
SELECT * FROM unnest(?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[], ?::bigint[])

-- name: going
SELECT zoid FROM (SELECT g.zoid FROM {oids} o CROSS JOIN LATERAL
    (SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid = o.zoid AND goes = 2 LIMIT 1) g LIMIT 100) found
UNION ALL SELECT -1 WHERE NOT EXISTS (
    SELECT 1 FROM {relstore_pack} p CROSS JOIN {relstore_meta} m
    WHERE p.generation = ? AND m.name = 'sweeping' AND m.value = p.token)

-- name: missing [hp]
SELECT o.zoid FROM {oids} o LEFT JOIN LATERAL (SELECT tid FROM {current_object} WHERE zoid = o.zoid LIMIT 1) c ON true
    LEFT JOIN LATERAL (SELECT state FROM {object_state} WHERE zoid = o.zoid AND tid = c.tid LIMIT 1) s ON true
WHERE s.state IS NULL LIMIT 100

-- name: missing [hf]
SELECT o.zoid FROM {oids} o
    LEFT JOIN LATERAL (SELECT state FROM {object_state} WHERE zoid = o.zoid LIMIT 1) s ON true
WHERE s.state IS NULL LIMIT 100

-- name: marked [hf]
SELECT g.zoid FROM {oids} o CROSS JOIN LATERAL
    (SELECT zoid FROM {relstore_garbage} WHERE generation = ? AND zoid = o.zoid AND goes = 0 LIMIT 1) g

-- name: current_tids
SELECT o.zoid, c.tid FROM {oids} o LEFT JOIN LATERAL (SELECT tid FROM {current} WHERE zoid = o.zoid LIMIT 1) c ON true

-- name: spare
UPDATE {relstore_garbage} SET goes = -1 WHERE zoid = ANY (?::bigint[]) AND generation = ?

-- name: forget_garbage
DELETE FROM {relstore_garbage} WHERE ctid = ANY (ARRAY(
    SELECT g.ctid FROM {relstore_garbage} g WHERE pg_catalog.abs(g.generation) NOT IN (?, ?)
        AND pg_catalog.abs(g.generation) NOT IN (SELECT generation FROM {relstore_sweep}) LIMIT 10000))

-- name: unknown_references [hp]
SELECT s.zoid, s.tid, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN LATERAL
     (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true
WHERE (s.zoid, s.tid) > (?, ?) AND s.zoid <= ? AND s.state IS NOT NULL AND s.refs IS NULL AND r.refs IS NULL
ORDER BY s.zoid, s.tid LIMIT ?

-- name: unknown_references [hf]
SELECT s.zoid, s.tid, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN LATERAL
     (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true
WHERE s.zoid > ? AND s.zoid <= ? AND s.state IS NOT NULL
      AND (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL ORDER BY s.zoid LIMIT ?

-- name: known_references [hp]
SELECT s.zoid, s.tid, s.refs, r.refs, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN LATERAL
     (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true
WHERE (s.zoid, s.tid) > (?, ?) AND s.zoid <= ? AND s.state IS NOT NULL ORDER BY s.zoid, s.tid LIMIT ?

-- name: known_references [hf]
SELECT s.zoid, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs,
       CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN LATERAL
     (SELECT refs FROM {relstore_refs} WHERE zoid = s.zoid AND tid = s.tid LIMIT 1) r ON true
WHERE s.zoid > ? AND s.zoid <= ? AND s.state IS NOT NULL ORDER BY s.zoid LIMIT ?

-- name: garbage_sizes [hp]
SELECT n.zoid, z.states, z.bytes, n.tid, CASE WHEN n.state_size <= 20000 THEN n.state END
FROM {revisions} r
     CROSS JOIN LATERAL (SELECT count(*) AS states, sum(state_size)::bigint AS bytes, max(tid) AS tid FROM {object_state}
                         WHERE zoid = r.zoid AND tid <= r.tid) z
     CROSS JOIN LATERAL (SELECT * FROM {object_state} WHERE zoid = r.zoid AND tid = z.tid LIMIT 1) n

-- name: garbage_sizes [hf]
SELECT n.zoid, 1, n.state_size, n.tid, CASE WHEN n.state_size <= 20000 THEN n.state END
FROM {revisions} r
     CROSS JOIN LATERAL (SELECT * FROM {object_state} WHERE zoid = r.zoid AND tid = r.tid LIMIT 1) n

-- A lock of the session, which is RelStorage's too.
-- name: lock_pack
SELECT pg_catalog.pg_try_advisory_lock({key}(-2::bigint))

-- name: lock_key
SELECT {key}(?::bigint)

-- name: lock_holders
SELECT l.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''), 'from ' || pg_catalog.host(a.client_addr),
                            'connected since ' || pg_catalog.to_char(a.backend_start AT TIME ZONE 'UTC',
                                                                     'YYYY-MM-DD HH24:MI:SS UTC'))
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid <> pg_catalog.pg_backend_pid()
      AND l.classid::bigint = ?::bigint >> 32 & 4294967295 AND l.objid::bigint = ?::bigint & 4294967295
      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = pg_catalog.current_database())
ORDER BY a.xact_start NULLS LAST LIMIT 3

-- Who keeps a process waiting; those who wait themselves come last. A prepared transaction has no process.
-- name: blockers
SELECT b.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''), 'from ' || pg_catalog.host(a.client_addr),
                            'connected since ' || pg_catalog.to_char(a.backend_start AT TIME ZONE 'UTC',
                                                                     'YYYY-MM-DD HH24:MI:SS UTC'))
FROM (SELECT DISTINCT pg_catalog.unnest(pg_catalog.pg_blocking_pids(?)) AS pid) b
     LEFT JOIN pg_stat_activity a ON a.pid = b.pid
ORDER BY a.wait_event_type IS NOT DISTINCT FROM 'Lock', a.xact_start LIMIT 3

-- A session that has the lock may be idle; before 14 it may anyway.
-- name: stay
SELECT pg_catalog.set_config(name, '0', false) FROM pg_settings WHERE name = 'idle_session_timeout'

-- Keep out whoever is between vote and finish.
-- name: lock_votes
BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT pg_catalog.set_config('lock_timeout', ?, true), pg_catalog.pg_advisory_xact_lock({key}(-3::bigint))

-- name: sweep
SELECT states, bytes FROM {relstore_sweep_2}(?::bigint, ?::bigint, ?::bigint)

-- name: forget_transactions [hp]
SELECT {relstore_forget_2}(?::bigint, ?::bigint, ?::boolean)

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

-- name: schema_exists
SELECT 1 FROM pg_namespace WHERE nspname = ?

-- Of the rights that a user needs, those that are missing, by number: kinds and names of objects, and the privileges. By
-- the oids of objects, because who may not use the schema may not name what is in it. What is not there is left out.
-- name: missing_rights
SELECT w.number
FROM (SELECT oid FROM pg_namespace WHERE nspname = ?) s
     CROSS JOIN unnest(?::text[], ?::text[], ?::text[]) WITH ORDINALITY w (kind, name, privilege, number)
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
-- name: strangers
WITH space AS (SELECT n.oid, n.nspowner FROM pg_namespace n WHERE n.nspname = ?),
     ours AS (SELECT ?::name[] AS names),
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
FROM unnest(?::name[], ?::text[]) w (name, types) CROSS JOIN space
     JOIN pg_proc p ON p.pronamespace = space.oid AND p.proname = w.name
WHERE NOT EXISTS (SELECT FROM pg_proc o WHERE o.pronamespace = space.oid AND o.proname = w.name
                      AND pg_catalog.replace(pg_catalog.oidvectortypes(o.proargtypes), '"'::text, ''::text) = w.types)
UNION ALL
SELECT 'path', p.first::text, NULL
FROM (SELECT s.name AS first FROM pg_catalog.unnest(pg_catalog.current_schemas(true)) WITH ORDINALITY s (name, number)
      WHERE NOT pg_catalog.starts_with(s.name::text, 'pg_temp'::text) ORDER BY s.number LIMIT 1) p
WHERE p.first <> 'pg_catalog'

-- name: relations
SELECT relname FROM pg_class WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?)
UNION ALL SELECT proname FROM pg_proc WHERE pg_catalog.starts_with(proname::text, 'relstore'::text)
    AND pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?)
UNION ALL SELECT tgname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
    WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?)
          AND relname = 'blob_chunk' AND NOT tgisinternal

-- name: columns
SELECT c.relname, a.attname, pg_catalog.format_type(a.atttypid, NULL)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?)
      AND c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') AND a.attnum > 0 AND NOT a.attisdropped

-- Changing the schema ------------------------------------------------------------------------------------------

-- Not by {key}, which this is about to create.
-- name: lock_schema
SELECT pg_catalog.pg_try_advisory_xact_lock(-4)

-- The pauses between tries are in it. The text of a function is looked at when it is made, in this search path.
-- name: stay_in_transaction
SELECT pg_catalog.set_config('idle_in_transaction_session_timeout', '0', true),
       pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true)

-- name: be_impatient
SELECT pg_catalog.set_config('lock_timeout', ?, true), pg_catalog.set_config('statement_timeout', '0', true)

-- name: end_after
SELECT pg_catalog.set_config('statement_timeout', ?, true)

-- Of the session: for a statement that cannot be in a transaction.
-- name: end_with_client
SELECT pg_catalog.set_config('statement_timeout', '0', false), pg_catalog.set_config('lock_timeout', '0', false),
       pg_catalog.set_config('client_connection_check_interval', '2s', false)

-- name: end_soon
SELECT pg_catalog.set_config('statement_timeout', '0', false), pg_catalog.set_config('lock_timeout', '10s', false)

-- Who uses a table since before the last try: what else there is has begun while it waited. A prepared transaction has no
-- process.
-- name: table_holders
SELECT l.pid, pg_catalog.concat_ws(', ', nullif(a.application_name, ''), a.usename,
           'from ' || pg_catalog.host(a.client_addr),
           nullif(a.backend_type, 'client backend'),
           a.state || ' since ' || pg_catalog.to_char(a.state_change AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),
           'in a transaction since ' || pg_catalog.to_char(a.xact_start AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS UTC'),
           'at ' || pg_catalog.quote_literal(pg_catalog.left(pg_catalog.regexp_replace(a.query, '\s+', ' ', 'g'), 60)))
FROM (SELECT DISTINCT k.pid FROM pg_locks k JOIN pg_class c ON c.oid = k.relation
      WHERE k.granted AND k.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
            AND c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?) AND c.relname = ?
            AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = pg_catalog.current_database())
            AND (? OR k.mode NOT IN ('AccessShareLock', 'RowShareLock'))) l
     LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE a.xact_start IS NULL OR a.xact_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => ?)
ORDER BY a.xact_start NULLS LAST LIMIT 3

-- name: size
SELECT coalesce(sum(pg_catalog.pg_total_relation_size(oid)), 0)::bigint FROM pg_class
WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = ?) AND relkind = 'r'

-- name: estimated_count [hp]
SELECT reltuples::bigint FROM pg_class WHERE oid = '{current_object}'::regclass::oid

-- name: estimated_count [hf]
SELECT reltuples::bigint FROM pg_class WHERE oid = '{object_state}'::regclass::oid

-- name: zap [hp]
LOCK TABLE {blob_chunk}, {current_object}, {object_state}, {transaction}, {object_ref}, {object_refs_added}, {pack_object},
    {pack_state}, {pack_state_tid}, {relstore_refs}, {relstore_garbage}, {relstore_pack} IN ACCESS EXCLUSIVE MODE;
SELECT pg_catalog.count(pg_catalog.lo_unlink(c.chunk)) FROM (SELECT DISTINCT chunk FROM {blob_chunk}) c;
TRUNCATE {blob_chunk}, {current_object}, {object_state}, {transaction}, {object_ref}, {object_refs_added}, {pack_object},
    {pack_state}, {pack_state_tid}, {relstore_refs}, {relstore_garbage}, {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, generation = 0, packed_to = 0;
INSERT INTO {transaction} (tid, username, description)
VALUES (0, CAST('system' AS {bytes}), CAST('special transaction for object creation' AS {bytes}));
DELETE FROM {relstore_epoch};
ALTER SEQUENCE {zoid_seq} RESTART

-- name: zap [hf]
LOCK TABLE {blob_chunk}, {object_state}, {object_ref}, {object_refs_added}, {pack_object},
    {relstore_refs}, {relstore_garbage}, {relstore_pack} IN ACCESS EXCLUSIVE MODE;
SELECT pg_catalog.count(pg_catalog.lo_unlink(c.chunk)) FROM (SELECT DISTINCT chunk FROM {blob_chunk}) c;
TRUNCATE {blob_chunk}, {object_state}, {object_ref}, {object_refs_added}, {pack_object},
    {relstore_refs}, {relstore_garbage}, {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, generation = 0, packed_to = 0;
DELETE FROM {relstore_epoch};
ALTER SEQUENCE {zoid_seq} RESTART
