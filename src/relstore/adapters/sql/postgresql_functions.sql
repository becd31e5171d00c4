-- One function per phase of a commit, so that each is one message.
--
-- A function is created when it is missing, and never replaced: what does something else than before gets a new number
-- in its name, so that relstore of two versions can work on one database at the same time. What does the same in less
-- time keeps its name, and a database that is there already keeps what it has.
--
-- Where others may create objects in a schema of the search path, theirs is what a call or an operator means whenever its
-- arguments are not exactly what pg_catalog has it for. So each function that a statement or a trigger calls has a search
-- path of its own, without those schemas; so have those that are called from it. relstore_load_1 and relstore_key_2 are
-- called by statements and have none, which would cost a load too much and keep the other from being unfolded: all that
-- they call and compare is exact.
--
-- Locks are RelStorage's: transaction-level advisory locks, keyed by oid, -1 for the commit. -3 is relstore's own:
-- shared from vote to finish, so that a large transaction, or a batch of a pack, can keep all others out; -5, of the
-- session, for moving the sequence.

-- The key of a lock, where the storage is in a schema of its own: advisory locks are per database.
-- name: relstore_key_2
CREATE FUNCTION {relstore_key_2}(p_key bigint) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT pg_catalog.hashint8extended(p_key, {seed}::bigint)
$$

-- ZODB's timestamp: minutes since 1900, counting 31 days to a month, then the fraction of the minute in 1/2^32.
-- name: relstore_tid_1
CREATE FUNCTION {relstore_tid_1}(p_time timestamp) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (((((extract(year FROM p_time)::bigint - 1900) * 12 + extract(month FROM p_time)::bigint - 1) * 31
              + extract(day FROM p_time)::bigint - 1) * 24 + extract(hour FROM p_time)::bigint) * 60
            + extract(minute FROM p_time)::bigint << 32)
           + floor(extract(second FROM p_time)::double precision * 4294967296 / 60)::bigint
$$

-- See to it that nextval gives none of the blocks up to p_block. Whoever else takes oids meanwhile must not see the
-- sequence go back: a short way is gone by nextval; a long one by setval, which nobody overtakes, one at a time. A
-- sequence moves at once, whatever becomes of the transaction, so its lock goes at once, too: in a transaction it would be
-- waited for by somebody who has the lock of the commit, which its holder is about to take.
-- name: relstore_reserve_3
CREATE FUNCTION {relstore_reserve_3}(p_block bigint) RETURNS void LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_last bigint;
BEGIN
    PERFORM pg_advisory_lock({key}({oids_lock}::bigint));
    SELECT CASE WHEN s.is_called THEN s.last_value ELSE 0 END INTO v_last FROM {zoid_seq} s;
    IF v_last + 100000 < p_block THEN
        PERFORM setval('{zoid_seq}', p_block);
    ELSE
        PERFORM nextval('{zoid_seq}') FROM generate_series(v_last + 1, p_block);
    END IF;
    PERFORM pg_advisory_unlock({key}({oids_lock}::bigint));
EXCEPTION WHEN OTHERS OR query_canceled THEN
    PERFORM pg_advisory_unlock({key}({oids_lock}::bigint));
    RAISE;
END $$

-- name: relstore_load_1 [hp]
CREATE FUNCTION {relstore_load_1}(p_oid bigint, p_at bigint)
RETURNS TABLE (state bytea, tid bigint, refs bytea) LANGUAGE plpgsql STABLE ROWS 1 AS $$
BEGIN
    RETURN QUERY SELECT s.state, s.tid, s.refs FROM {object_state} s WHERE s.zoid = p_oid AND s.tid <= p_at
        ORDER BY s.tid DESC LIMIT 1;
END $$

-- name: relstore_load_1 [hf]
CREATE FUNCTION {relstore_load_1}(p_oid bigint, p_at bigint)
RETURNS TABLE (state bytea, tid bigint, refs bytea) LANGUAGE plpgsql STABLE ROWS 1 AS $$
BEGIN
    RETURN QUERY SELECT s.state, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END
        FROM {object_state} s WHERE s.zoid = p_oid AND s.tid <= p_at;
END $$

-- STABLE: all its statements see the snapshot of the one that calls it. The order, which may not be
-- had by sorting, makes the index on tid the plan, also before the first ANALYZE, when a third is guessed to be new.
-- With history an object is listed for each of its changes, because current_object may lack that index. stands: the newest
-- transaction up to p_since that has left anything, which is asked only where there are newer ones.
-- name: relstore_poll_4
CREATE FUNCTION {relstore_poll_4}(
    p_since bigint, p_limit bigint,
    OUT epoch text, OUT last bigint, OUT sweeps bigint, OUT stands bigint, OUT oids bigint[], OUT tids bigint[])
LANGUAGE plpgsql STABLE SET enable_sort = off SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    SELECT ({epoch}), coalesce((SELECT max(t.tid) FROM {last} t), 0), s.number INTO epoch, last, sweeps
        FROM {relstore_sweep} s;
    stands := last;
    IF last > p_since THEN
        SELECT coalesce(max(t.tid), 0) INTO stands FROM {last} t WHERE t.tid <= p_since;
        SELECT array_agg(c.zoid), array_agg(c.tid) INTO oids, tids
            FROM (SELECT o.zoid, o.tid FROM {object_state} o WHERE o.tid > p_since ORDER BY o.tid LIMIT p_limit) c;
    END IF;
END $$

-- Rows come as arrays; all states stand in one value, all references in another, each row naming its slice.
-- name: relstore_rows_1
CREATE FUNCTION {relstore_rows_1}(
    p_oids bigint[], p_starts integer[], p_sizes integer[], p_md5s text[], p_data_tids bigint[],
    p_refs_starts integer[], p_refs_sizes integer[], p_states bytea, p_refs bytea)
RETURNS TABLE (zoid bigint, size integer, md5 text, data_tid bigint, state bytea, refs bytea)
LANGUAGE sql IMMUTABLE ROWS 10 AS $$
    SELECT r.zoid, r.size, r.md5, r.data_tid,
           substring(p_states, r.start + 1, r.size), substring(p_refs, r.refs_start + 1, r.refs_size)
    FROM unnest(p_oids, p_starts, p_sizes, p_md5s, p_data_tids, p_refs_starts, p_refs_sizes)
         AS r (zoid, start, size, md5, data_tid, refs_start, refs_size)
$$

-- Wait for a lock that is not free. Where it does not become free in time, say who has it: an exception is caught for
-- that here alone, because a block that catches one is a transaction of its own.
-- name: relstore_wait_2
CREATE FUNCTION {relstore_wait_2}(
    p_key bigint, p_shared boolean, OUT waited bigint, OUT holder bigint, OUT who text)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_start timestamptz := clock_timestamp();
BEGIN
    BEGIN
        IF p_shared THEN
            PERFORM pg_advisory_xact_lock_shared(p_key);
        ELSE
            PERFORM pg_advisory_xact_lock(p_key);
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        SELECT l.pid, concat_ws(', ', nullif(a.application_name, ''), 'from ' || host(a.client_addr),
                                'in a transaction since ' || to_char(a.xact_start AT TIME ZONE 'UTC', 'HH24:MI:SS UTC'))
            INTO holder, who
            FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
            WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1 AND l.pid <> pg_backend_pid()
              AND l.classid::bigint = p_key >> 32 & 4294967295 AND l.objid::bigint = p_key & 4294967295
              AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            ORDER BY a.xact_start LIMIT 1;
        holder := coalesce(holder, 0);
    END;
    waited := extract(epoch FROM clock_timestamp() - v_start) * 1000000;
END $$

-- Vote: lock, then read. VOLATILE plpgsql in READ COMMITTED, because only there does a statement that follows a
-- wait see what was committed during the wait. p_alone: keep everybody else out, who begin with -3 shared.
-- p_each: lock each object. Not where p_alone does it, for the server has room for some thousands of locks; but
-- RelStorage, where it writes, knows no other locks, and is kept out of a deletion by that of the commit.
-- p_at, p_known_oids, p_known_tids: what the transaction stands on, see proof.py.
-- Returns rows (kind, zoid, tid, state): 'epoch', 'read', 'locked', 'late' and 'busy' (a lock was not free in time;
-- pid of a holder, and who that is) refuse the commit; 'conflict' is an object whose current revision is not the
-- one the change was based on, the first 100 with their states; 'waited' tells the microseconds that a lock took;
-- 'since' (a tid) and 'ticket' (backend pid, transaction id) are what the outcome check will need; 'since' has the number
-- of the last sweep, and 'sweeping' the pack_id of one that is under way: then what is linked has to be looked at.
-- name: relstore_vote_6
CREATE FUNCTION {relstore_vote_6}(
    p_epoch text, p_timeout text, p_restored_tid bigint, p_alone boolean, p_each boolean, p_at bigint, p_locks bigint[],
    p_oids bigint[], p_tids bigint[], p_read_oids bigint[], p_read_tids bigint[], p_known_oids bigint[],
    p_known_tids bigint[])
RETURNS TABLE (kind text, zoid bigint, tid bigint, state bytea)
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_waited boolean := false;
    v_lock bigint;
    v_shared boolean;
    v_wait record;
    v_sweeping bigint;
BEGIN
    -- For finish too, which is not to fail because a role's statements may not take long. To plan for the arrays at hand
    -- took a third of a small commit, so plans are kept; and because the table may be small when they are made and large
    -- tomorrow, objects are looked up one by one.
    PERFORM set_config('lock_timeout', p_timeout, true), set_config('statement_timeout', '0', true),
            set_config('plan_cache_mode', 'force_generic_plan', true),
            set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true),
            set_config('enable_mergejoin', 'off', true), set_config('jit', 'off', true);
    IF ({epoch}) IS DISTINCT FROM p_epoch THEN
        RETURN QUERY SELECT 'epoch', 0::bigint, 0::bigint, NULL::bytea;
        RETURN;
    END IF;
    IF p_read_oids <> '{{}}' THEN
        RETURN QUERY SELECT 'read', r.zoid, coalesce(c.tid, 0), NULL::bytea
            FROM unnest(p_read_oids, p_read_tids) r (zoid, tid) LEFT JOIN {current} c ON c.zoid = r.zoid
            WHERE coalesce(c.tid, 0) <> r.tid;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    IF NOT p_each THEN
        p_locks := '{{}}';
    END IF;
    IF p_restored_tid IS NOT NULL OR p_alone AND p_each THEN
        p_locks := p_locks || {commit_lock}::bigint;
    END IF;
    FOREACH v_lock IN ARRAY {everybody}::bigint || p_locks LOOP
        v_shared := v_lock = {everybody} AND NOT p_alone;
        IF NOT (CASE WHEN v_shared THEN pg_try_advisory_xact_lock_shared({key}(v_lock))
                     ELSE pg_try_advisory_xact_lock({key}(v_lock)) END)
        THEN
            v_wait := {relstore_wait_2}({key}(v_lock), v_shared);
            v_waited := true;
            RETURN QUERY SELECT 'waited', v_lock, v_wait.waited, NULL::bytea;
            IF v_wait.holder IS NOT NULL THEN
                RETURN QUERY SELECT 'busy', v_lock, v_wait.holder, convert_to(v_wait.who, 'UTF8');
                RETURN;
            END IF;
        END IF;
    END LOOP;
    -- Shared locks come last and never wait: waiting for one while holding others deadlocks.
    IF p_each THEN
        FOREACH v_lock IN ARRAY p_read_oids LOOP
            IF NOT pg_try_advisory_xact_lock_shared({key}(v_lock)) THEN
                RETURN QUERY SELECT 'locked', v_lock, 0::bigint, NULL::bytea;
                RETURN;
            END IF;
        END LOOP;
    END IF;
    SELECT coalesce(max(t.tid), 0) INTO tid FROM {last} t;
    IF tid >= p_restored_tid THEN
        RETURN QUERY SELECT 'late', 0::bigint, tid, NULL::bytea;
        RETURN;
    END IF;
    kind := 'since';
    SELECT s.number, CASE WHEN s.sweeping > 0 THEN s.sweeping ELSE -s.deleted END INTO zoid, v_sweeping
    FROM {relstore_sweep} s;
    RETURN NEXT;
    IF v_sweeping <> 0 THEN
        RETURN QUERY SELECT 'sweeping', v_sweeping, 0::bigint, NULL::bytea;
    END IF;
    IF p_read_oids <> '{{}}' THEN
        RETURN QUERY SELECT 'read', r.zoid, coalesce(c.tid, 0), NULL::bytea
            FROM unnest(p_read_oids, p_read_tids) r (zoid, tid) LEFT JOIN {current} c ON c.zoid = r.zoid
            WHERE coalesce(c.tid, 0) <> r.tid;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    -- Looked at no earlier: whoever empties the tables would wait for one that waits. Or they were emptied meanwhile.
    IF {lost} OR v_waited AND ({epoch}) IS DISTINCT FROM p_epoch THEN
        RETURN QUERY SELECT 'epoch', 0::bigint, 0::bigint, NULL::bytea;
        RETURN;
    END IF;
    -- Asked at first without the states, which takes half as long to begin: few commits have a conflict.
    IF EXISTS (SELECT FROM unnest(p_oids, p_tids) o (zoid, tid) LEFT JOIN {current} c ON c.zoid = o.zoid
               WHERE coalesce(c.tid, 0) <> o.tid)
    THEN
        RETURN QUERY SELECT 'conflict', o.zoid, coalesce(c.tid, 0),
                            CASE WHEN row_number() OVER () <= {together} THEN s.state END
            FROM unnest(p_oids, p_tids) o (zoid, tid) LEFT JOIN {current} c ON c.zoid = o.zoid
                 LEFT JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
            WHERE coalesce(c.tid, 0) <> o.tid;
    END IF;
    kind := 'ticket';
    zoid := pg_backend_pid();
    tid := pg_current_xact_id()::text::bigint;
    RETURN NEXT;
END $$

-- What does not fit into one message is sent ahead, at vote.
-- name: relstore_stage_2
CREATE FUNCTION {relstore_stage_2}(
    p_oids bigint[], p_starts integer[], p_sizes integer[], p_md5s text[], p_data_tids bigint[],
    p_refs_starts integer[], p_refs_sizes integer[], p_states bytea, p_refs bytea)
RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF to_regclass('pg_temp.relstore_stage') IS NULL THEN
        CREATE TEMPORARY TABLE relstore_stage
            (zoid bigint, size integer, md5 text, data_tid bigint, state bytea, refs bytea) ON COMMIT DROP;
    END IF;
    INSERT INTO pg_temp.relstore_stage
        SELECT * FROM {relstore_rows_1}(p_oids, p_starts, p_sizes, p_md5s, p_data_tids, p_refs_starts, p_refs_sizes,
                                        p_states, p_refs);
END $$

-- What exists is updated and what is new inserted, each as what it is: an upsert would lock each row before, which takes
-- three times as long, and all in one statement takes longer to begin than it runs for a small commit. New is also what
-- RelStorage's pack, which holds none of our locks, removes while we wait for the row.
-- name: relstore_write_2 [hp]
CREATE FUNCTION {relstore_write_2}(
    p_tid bigint, p_staged boolean, p_oids bigint[], p_starts integer[], p_sizes integer[], p_md5s text[],
    p_data_tids bigint[], p_refs_starts integer[], p_refs_sizes integer[], p_states bytea, p_refs bytea)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_new bigint[];
    v_changed bigint[];
    v_count bigint;
BEGIN
    IF p_staged THEN
        WITH written AS (
            INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
                SELECT r.zoid, p_tid, coalesce(c.tid, 0), r.md5, coalesce(r.size, 0), r.state, r.refs, r.data_tid
                FROM pg_temp.relstore_stage r LEFT JOIN {current_object} c ON c.zoid = r.zoid
                RETURNING zoid, prev_tid)
        SELECT array_agg(zoid) FILTER (WHERE prev_tid = 0), array_agg(zoid) FILTER (WHERE prev_tid <> 0)
            INTO v_new, v_changed FROM written;
    ELSE
        WITH written AS (
            INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
                SELECT r.zoid, p_tid, coalesce(c.tid, 0), r.md5, coalesce(r.size, 0), r.state, r.refs, r.data_tid
                FROM {relstore_rows_1}(p_oids, p_starts, p_sizes, p_md5s, p_data_tids, p_refs_starts, p_refs_sizes,
                                       p_states, p_refs) r
                     LEFT JOIN {current_object} c ON c.zoid = r.zoid
                RETURNING zoid, prev_tid)
        SELECT array_agg(zoid) FILTER (WHERE prev_tid = 0), array_agg(zoid) FILTER (WHERE prev_tid <> 0)
            INTO v_new, v_changed FROM written;
    END IF;
    IF v_changed IS NOT NULL THEN
        UPDATE {current_object} c SET tid = p_tid FROM unnest(v_changed) w (zoid) WHERE c.zoid = w.zoid;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        IF v_count < cardinality(v_changed) THEN
            SELECT v_new || array_agg(w.zoid) INTO v_new
                FROM unnest(v_changed) w (zoid) LEFT JOIN {current_object} c ON c.zoid = w.zoid WHERE c.zoid IS NULL;
        END IF;
    END IF;
    IF v_new IS NOT NULL THEN
        INSERT INTO {current_object} (zoid, tid) SELECT n.zoid, p_tid FROM unnest(v_new) n (zoid);
    END IF;
END $$

-- name: relstore_write_2 [hf]
CREATE FUNCTION {relstore_write_2}(
    p_tid bigint, p_staged boolean, p_oids bigint[], p_starts integer[], p_sizes integer[], p_md5s text[],
    p_data_tids bigint[], p_refs_starts integer[], p_refs_sizes integer[], p_states bytea, p_refs bytea)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_changed bigint;
BEGIN
    IF p_staged THEN
        UPDATE {object_state} s SET tid = p_tid, state_size = coalesce(r.size, 0), state = r.state, refs = r.refs,
                refs_tid = p_tid
            FROM pg_temp.relstore_stage r WHERE s.zoid = r.zoid;
        INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
            SELECT r.zoid, p_tid, coalesce(r.size, 0), r.state, r.refs, p_tid
            FROM pg_temp.relstore_stage r LEFT JOIN {object_state} s ON s.zoid = r.zoid WHERE s.zoid IS NULL;
    ELSE
        UPDATE {object_state} s SET tid = p_tid, state_size = coalesce(r.size, 0), state = r.state, refs = r.refs,
                refs_tid = p_tid
            FROM {relstore_rows_1}(p_oids, p_starts, p_sizes, p_md5s, p_data_tids, p_refs_starts, p_refs_sizes,
                                   p_states, p_refs) r
            WHERE s.zoid = r.zoid;
        GET DIAGNOSTICS v_changed = ROW_COUNT;
        IF v_changed < cardinality(p_oids) THEN
            INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
                SELECT r.zoid, p_tid, coalesce(r.size, 0), r.state, r.refs, p_tid
                FROM {relstore_rows_1}(p_oids, p_starts, p_sizes, p_md5s, p_data_tids, p_refs_starts, p_refs_sizes,
                                       p_states, p_refs) r
                     LEFT JOIN {object_state} s ON s.zoid = r.zoid WHERE s.zoid IS NULL;
        END IF;
    END IF;
END $$

-- For blobs that are files, whose names have the tid: what finish begins with, which is then given this tid.
-- name: relstore_choose_1
CREATE FUNCTION {relstore_choose_1}(p_timeout text, OUT tid bigint, OUT waited bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_now timestamp;
    v_start timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', p_timeout, true);
    waited := 0;
    IF NOT pg_try_advisory_xact_lock({key}({commit_lock}::bigint)) THEN
        v_start := clock_timestamp();
        PERFORM pg_advisory_xact_lock({key}({commit_lock}::bigint));
        waited := extract(epoch FROM clock_timestamp() - v_start) * 1000000;
    END IF;
    v_now := clock_timestamp() AT TIME ZONE 'UTC';
    SELECT greatest(coalesce(max(t.tid), 0) + 1, {relstore_tid_1}(v_now)) INTO tid FROM {last} t;
END $$

-- Finish: under the commit lock choose the tid and write. The lock ends with the COMMIT that follows in the same
-- message. p_group: that COMMIT does not wait for the disk, because another will, without the lock. p_tid is given where
-- transactions are restored; p_transaction is the ticket that vote gave.
-- Returns the tid and the microseconds that the lock took, with a blank between.
-- name: relstore_finish_3
CREATE FUNCTION {relstore_finish_3}(
    p_transaction bigint, p_timeout text, p_group boolean, p_tid bigint, p_packed boolean, p_user bytea,
    p_description bytea, p_extension bytea, p_staged boolean, p_oids bigint[], p_starts integer[], p_sizes integer[],
    p_md5s text[], p_data_tids bigint[], p_refs_starts integer[], p_refs_sizes integer[], p_states bytea, p_refs bytea)
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_tid bigint;
    v_now timestamp;
    v_start timestamptz;
    v_waited bigint := 0;
BEGIN
    IF pg_current_xact_id()::text::bigint <> p_transaction THEN
        RAISE 'this is not the transaction that has voted';
    END IF;
    IF p_group THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    PERFORM set_config('lock_timeout', p_timeout, true);        -- for rows and tables too
    IF NOT pg_try_advisory_xact_lock({key}({commit_lock}::bigint)) THEN
        v_start := clock_timestamp();
        PERFORM pg_advisory_xact_lock({key}({commit_lock}::bigint));
        v_waited := extract(epoch FROM clock_timestamp() - v_start) * 1000000;
    END IF;
    v_now := clock_timestamp() AT TIME ZONE 'UTC';      -- a function is not unfolded where what it is given may change
    SELECT coalesce(p_tid, greatest(coalesce(max(t.tid), 0) + 1, {relstore_tid_1}(v_now))) INTO v_tid FROM {last} t;
    {insert_transaction}
    PERFORM {relstore_write_2}(v_tid, p_staged, p_oids, p_starts, p_sizes, p_md5s, p_data_tids, p_refs_starts,
                               p_refs_sizes, p_states, p_refs);
    RETURN v_tid || ' ' || v_waited;
END $$

-- A batch of a sweep: what is to go of the objects after p_after, up to p_upto. Plans that go from object to object are the
-- right ones, and the list of what is to go has no statistics yet. Nobody waits for these rows: vote refuses what links to
-- them, and what RelStorage has changed nevertheless has another tid.
-- name: relstore_sweep_4 [hp]
CREATE FUNCTION {relstore_sweep_4}(
    p_pack_id bigint, p_after bigint, p_upto bigint, OUT states bigint, OUT bytes bigint, OUT blobs bigint,
    OUT blob_bytes bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM {current_object} c USING {relstore_garbage} g
        WHERE g.pack_id = p_pack_id AND g.zoid > p_after AND g.zoid <= p_upto AND g.goes = {goes_object}
              AND c.zoid = g.zoid AND c.tid = g.tid;
    WITH gone AS (
        DELETE FROM {object_state} s USING {relstore_garbage} g
            WHERE g.pack_id = p_pack_id AND g.zoid > p_after AND g.zoid <= p_upto AND g.goes > {goes_later}
                  AND s.zoid = g.zoid AND s.tid < g.tid + g.goes - 1
                  AND (g.goes = {goes_older} OR NOT EXISTS (SELECT FROM {current_object} c WHERE c.zoid = g.zoid))
            RETURNING s.zoid, s.tid, s.state_size)
    SELECT count(*), coalesce(sum(g.state_size), 0), count(r.zoid), coalesce(sum(r.size), 0)
        INTO states, bytes, blobs, blob_bytes
        FROM gone g LEFT JOIN {relstore_blob} r ON r.zoid = g.zoid AND r.tid = g.tid;
    IF EXISTS (SELECT FROM {relstore_refs}) THEN
        DELETE FROM {relstore_refs} r USING {relstore_garbage} g
            WHERE g.pack_id = p_pack_id AND g.zoid > p_after AND g.zoid <= p_upto AND g.goes > {goes_later}
                  AND r.zoid = g.zoid AND r.tid < g.tid + g.goes - 1;
    END IF;
END $$

-- name: relstore_sweep_4 [hf]
CREATE FUNCTION {relstore_sweep_4}(
    p_pack_id bigint, p_after bigint, p_upto bigint, OUT states bigint, OUT bytes bigint, OUT blobs bigint,
    OUT blob_bytes bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    WITH gone AS (
        DELETE FROM {object_state} s USING {relstore_garbage} g
            WHERE g.pack_id = p_pack_id AND g.zoid > p_after AND g.zoid <= p_upto AND g.goes = {goes_object}
                  AND s.zoid = g.zoid AND s.tid = g.tid
            RETURNING s.zoid, s.tid, s.state_size)
    SELECT count(*), coalesce(sum(g.state_size), 0), count(r.zoid), coalesce(sum(r.size), 0)
        INTO states, bytes, blobs, blob_bytes
        FROM gone g LEFT JOIN {relstore_blob} r ON r.zoid = g.zoid AND r.tid = g.tid;
    IF EXISTS (SELECT FROM {relstore_refs}) THEN
        DELETE FROM {relstore_refs} r USING {relstore_garbage} g
            WHERE g.pack_id = p_pack_id AND g.zoid > p_after AND g.zoid <= p_upto AND g.goes = {goes_object}
                  AND r.zoid = g.zoid AND r.tid = g.tid;
    END IF;
END $$

-- Of the transactions after p_after, up to p_upto, remove those that have no state left, and mark the others as packed.
-- p_named: RelStorage's foreign key is there, so that one stays that a kept state replaced. Where what was replaced is
-- gone, none is named any more: a pack of RelStorage's would fail at it, for it leaves no such name itself.
-- name: relstore_forget_3 [hp]
CREATE FUNCTION {relstore_forget_3}(p_after bigint, p_upto bigint, p_named boolean) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    IF p_named THEN
        UPDATE {object_state} s SET prev_tid = 0
            WHERE s.prev_tid > p_after AND s.prev_tid <= p_upto
                  AND NOT EXISTS (SELECT FROM {object_state} r WHERE r.zoid = s.zoid AND r.tid = s.prev_tid);
    END IF;
    DELETE FROM {transaction} t
        WHERE t.tid > p_after AND t.tid <= p_upto AND t.tid > 0 AND t.tid < (SELECT max(n.tid) FROM {transaction} n)
              AND NOT EXISTS (SELECT FROM {object_state} s WHERE s.tid = t.tid)
              AND NOT (p_named AND EXISTS (SELECT FROM {object_state} s WHERE s.prev_tid = t.tid));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    UPDATE {transaction} SET packed = TRUE WHERE tid > p_after AND tid <= p_upto AND tid > 0 AND NOT packed;
    RETURN v_count;
END $$
