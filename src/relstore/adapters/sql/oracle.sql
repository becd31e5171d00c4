-- What Oracle says otherwise, from version 19c on.
--   A block of PL/SQL is one message. In it `:told` is what it tells, words with blanks between them, and `:rows` a
--   cursor: the first word says whether that has any rows. A line of a block that ends with a semicolon ends a
--   statement, and IF, ELSE and END IF have lines of their own: so what is in a block can be run without PL/SQL.
--   WAIT 10 stands for as many seconds as the caller says: Oracle takes no parameter there.

-- Macros -------------------------------------------------------------------------------------------------------

-- Types of columns, and a value of one.
-- macro: id
NUMBER(20)

-- macro: integer
NUMBER(20)

-- macro: bytes
BLOB

-- macro: chunk
BLOB

-- macro: bool
CHAR(1)

-- macro: no
'N'

-- macro: md5
CHAR(32)

-- macro: digest
RAW(32)

-- macro: text
VARCHAR2(100)

-- A list is given as a collection of texts, which takes any number of them, and anybody may use.
-- macro: oids
(SELECT /*+ CARDINALITY(l 10) */ CAST(l.column_value AS NUMBER(20)) AS zoid FROM {list_of}$oids {listed} l)

-- macro: revisions
(SELECT /*+ CARDINALITY(l 10) */ CAST(substr(l.column_value, 1, 20) AS NUMBER(20)) AS zoid,
    CAST(substr(l.column_value, 21) AS NUMBER(20)) AS tid FROM {list_of}$revisions {listed} l)

-- macro: list_of
TABLE(CAST(

-- macro: listed
AS SYS.DBMS_DEBUG_VC2COLL))

-- macro: upto_count
(SELECT LEVEL AS n FROM dual CONNECT BY LEVEL <= $count)

-- The rows of relstore_lock, from -1 on.
-- macro: upto_locks
(SELECT LEVEL AS n FROM dual CONNECT BY LEVEL <= 65)

-- macro: temporary
GLOBAL TEMPORARY

-- macro: limit
FETCH FIRST $limit ROWS ONLY

-- macro: one
FETCH FIRST 1 ROWS ONLY

-- macro: some
FETCH FIRST 100 ROWS ONLY

-- macro: then
JOIN

-- There is no comparison of rows, and no truth value.
-- macro: after [hp]
s.zoid >= $oid AND (s.zoid > $oid OR s.tid > $tid)

-- macro: later
s.tid >= $tid AND (s.tid > $tid OR s.zoid > $oid)

-- macro: deleted
CASE WHEN s.state IS NULL THEN 1 ELSE 0 END AS deleted

-- macro: revision
s.zoid, s.tid, CASE WHEN {known} IS NOT NULL THEN {known} ELSE r.refs END AS refs,
       CASE WHEN {unknown} AND s.state_size <= {small_state_bytes} THEN s.state END AS state, {deleted}

-- macro: epoch
SELECT e.value || '.' || {version} || '.' || {server_name} FROM {relstore_epoch} e

-- Of a standby that takes over it is another one: it may lack commits that were acknowledged.
-- macro: server_name
SYS_CONTEXT('USERENV', 'DB_UNIQUE_NAME')

-- The pack_id of a sweep under way; else what was deleted, the sign turned.
-- macro: sweep_told
CASE WHEN w.sweeping > 0 THEN w.sweeping ELSE -w.deleted END

-- macro: utc
SYS_EXTRACT_UTC(SYSTIMESTAMP)

-- macro: now_seconds
ROUND((CAST({utc} AS DATE) - DATE '1970-01-01') * 86400)

-- ZODB's timestamp: minutes since 1900, counting 31 days to a month, then the fraction of the minute in 1/2^32.
-- macro: clock
(((((EXTRACT(YEAR FROM n.now) - 1900) * 12 + EXTRACT(MONTH FROM n.now) - 1) * 31 + EXTRACT(DAY FROM n.now) - 1) * 24
    + EXTRACT(HOUR FROM n.now)) * 60 + EXTRACT(MINUTE FROM n.now)) * 4294967296
    + TRUNC({second_of_now} * 4294967296 / 60)

-- With its fraction.
-- macro: second_of_now
EXTRACT(SECOND FROM n.now)

-- macro: now
(SELECT {utc} AS now FROM dual) n

-- No shared lock of a row is to be had.
-- macro: hold
FOR UPDATE

-- macro: lock_if_free
FOR UPDATE SKIP LOCKED

-- macro: length_of_chunk
coalesce(DBMS_LOB.GETLENGTH(b.chunk), 0)

-- Of a list, the objects that a batch of a sweep is about.
-- macro: in_batch
g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid

-- Connecting ---------------------------------------------------------------------------------------------------

-- name: server
SELECT version FROM product_component_version WHERE product LIKE 'Oracle%'

-- Indexes too: Oracle commits each statement that makes something, so each has to be looked for.
-- name: relations
SELECT lower(object_name) FROM user_objects WHERE object_type IN ('TABLE', 'VIEW', 'SEQUENCE', 'INDEX')

-- A sequence has the column that one of PostgreSQL's has: see completion.py.
-- name: columns
SELECT lower(table_name), lower(column_name), CASE data_type WHEN 'NUMBER' THEN 'integer' ELSE data_type END AS kind
FROM user_tab_columns
UNION ALL SELECT lower(sequence_name), 'is_called', 'sequence' FROM user_sequences

-- name: current_user
SELECT user FROM dual

-- name: has_sweep
SELECT 1 FROM {relstore_sweep}

-- name: make_schema_lock
CREATE TABLE {relstore_schema_lock} (one NUMBER(1))

-- name: lock_schema
LOCK TABLE {relstore_schema_lock} IN EXCLUSIVE MODE WAIT 10

-- name: begin
SET TRANSACTION ISOLATION LEVEL READ COMMITTED

-- A hint has Oracle leave out a row whose key is there, though another transaction has made it just now.
-- name: new_epoch (value)
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_epoch} (one)) */ INTO {relstore_epoch} (one, value)
SELECT 1, $value FROM dual WHERE NOT EXISTS (SELECT 1 FROM {relstore_epoch} x WHERE x.one = 1)

-- name: forget_epoch
DELETE FROM {relstore_epoch}

-- name: add_meta (name, value)
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_meta} (name)) */ INTO {relstore_meta} (name, value)
SELECT $name, $value FROM dual WHERE NOT EXISTS (SELECT 1 FROM {relstore_meta} x WHERE x.name = $name)

-- name: set_meta (name, value)
BEGIN
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_meta} (name)) */ INTO {relstore_meta} (name, value)
SELECT $name, $value FROM dual WHERE NOT EXISTS (SELECT 1 FROM {relstore_meta} x WHERE x.name = $name);
UPDATE {relstore_meta} SET value = $value WHERE name = $name;
END;

-- Locked until they are deleted: a session that has been idle for a day may vote at any time.
-- name: old_commits
SELECT session_key FROM {relstore_commit} WHERE voted < {now_seconds} - 86400 AND ROWNUM <= 1000 FOR UPDATE SKIP LOCKED

-- name: forget_commits (oids)
DELETE FROM {relstore_commit} WHERE session_key IN (SELECT o.zoid FROM {oids} o)

-- Reading ------------------------------------------------------------------------------------------------------

-- First whether anything has changed. With history all changes are asked for: an object that has changed again since
-- would hide that it has changed before. What came after the newest tid is left out by the caller.
-- name: poll (since, most) [hp]
BEGIN
SELECT CASE WHEN EXISTS (SELECT 1 FROM {object_state} s WHERE s.tid > $since) THEN 1 ELSE 0 END
    || ' ' || ({epoch}) || ' ' ||
    (SELECT coalesce(max(t.tid), 0) FROM {transaction} t) || ' ' || w.number || ' ' ||
    (SELECT coalesce(max(t.tid), 0) FROM {transaction} t WHERE t.tid <= $since)
INTO :told FROM {relstore_sweep} w;
OPEN :rows FOR SELECT s.zoid, s.tid FROM {object_state} s WHERE s.tid > $since
ORDER BY s.tid FETCH FIRST $most ROWS ONLY;
END;

-- name: poll (since, most) [hf]
BEGIN
SET TRANSACTION READ ONLY;
SELECT CASE WHEN EXISTS (SELECT 1 FROM {object_state} s WHERE s.tid > $since) THEN 1 ELSE 0 END
    || ' ' || ({epoch}) || ' ' ||
    (SELECT coalesce(max(t.tid), 0) FROM {object_state} t) || ' ' || w.number || ' ' ||
    (SELECT coalesce(max(t.tid), 0) FROM {object_state} t WHERE t.tid <= $since)
INTO :told FROM {relstore_sweep} w;
OPEN :rows FOR SELECT s.zoid, s.tid FROM {object_state} s WHERE s.tid > $since
ORDER BY s.tid FETCH FIRST $most ROWS ONLY;
END;

-- name: begin_snapshot
SET TRANSACTION READ ONLY

-- name: transactions (tid, stop, limit) [hp]
SELECT tid, CASE WHEN packed = 'Y' THEN 1 ELSE 0 END AS packed, username, description, extension FROM {transaction}
WHERE tid >= $tid AND tid <= $stop AND tid > 0 ORDER BY tid {limit}

-- name: transactions (tid, stop, limit) [hf]
SELECT DISTINCT tid, 0 AS packed, NULL AS username, NULL AS description, NULL AS extension
FROM {object_state} WHERE tid >= $tid AND tid <= $stop ORDER BY tid {limit}

-- The columns have no more than 2000 bytes.
-- name: author (tid) [hp]
SELECT username, description FROM {transaction} WHERE tid = $tid

-- name: last_marked
SELECT pack_id FROM {relstore_pack} WHERE progress = 'swept' AND gc <> 0 ORDER BY pack_id DESC {one}

-- Chunks: the parts of a long one have to be read by its locator, so of that there is only the length here.
-- name: chunk_rows (oid, tid, number, start, size, limit)
SELECT (SELECT max(l.chunk_num) FROM {blob_chunk} l WHERE l.zoid = $oid AND l.tid = $tid) AS last_num,
    b.chunk_num, {length_of_chunk} AS chunk_size,
    CASE WHEN {length_of_chunk} <= $size AND (b.chunk_num > $number OR $start = 1) THEN b.chunk END AS chunk,
    r.size, r.digest
FROM {blob_chunk} b LEFT JOIN {relstore_blob} r ON r.zoid = b.zoid AND r.tid = b.tid
WHERE b.zoid = $oid AND b.tid = $tid AND b.chunk_num >= $number
ORDER BY b.chunk_num {limit}

-- name: long_chunk (oid, tid, number)
SELECT b.chunk FROM {blob_chunk} b WHERE b.zoid = $oid AND b.tid = $tid AND b.chunk_num = $number

-- name: blob_size (oid, tid)
SELECT sum({length_of_chunk}) FROM {blob_chunk} b WHERE b.zoid = $oid AND b.tid = $tid

-- name: add_record (size, digest, oid, tid)
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_blob}, relstore_blob_pk) */
INTO {relstore_blob} (zoid, tid, size, digest)
SELECT s.zoid, s.tid, $size, $digest FROM {object_state} s WHERE s.zoid = $oid AND s.tid = $tid
    AND NOT EXISTS (SELECT 1 FROM {relstore_blob} x WHERE x.zoid = $oid AND x.tid = $tid)

-- So that it is not replaced meanwhile.
-- name: lock_revision (oid, tid)
SELECT zoid FROM {object_state} WHERE zoid = $oid AND tid = $tid FOR UPDATE

-- Objects of blobs: see objects.py. ------------------------------------------------------------------------------

-- name: want_object (digest, version, size, wisher)
BEGIN
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_digest} (digest)) */
INTO {relstore_digest} (digest, version, size, wanted, wisher, state)
SELECT $digest, $version, $size, {now_seconds}, $wisher, {object_used} FROM dual
WHERE NOT EXISTS (SELECT 1 FROM {relstore_digest} x WHERE x.digest = $digest);
UPDATE {relstore_digest} SET version = CASE WHEN state = {object_goes} THEN $version ELSE version END,
    wanted = {now_seconds}, wisher = $wisher, state = {object_used} WHERE digest = $digest;
END;

-- The first page has no digest before it: the empty string is NULL.
-- name: objects (digest, limit)
SELECT d.digest, d.version, d.size, d.state, {now_seconds} - d.wanted AS age,
       CASE WHEN EXISTS (SELECT 1 FROM {relstore_blob} b WHERE b.digest = d.digest) THEN 1 ELSE 0 END AS referred
FROM {relstore_digest} d WHERE $digest IS NULL OR d.digest > $digest ORDER BY d.digest {limit}

-- Committing: one message for vote, one for what is staged, one for finish. ---------------------------------------

-- What a vote is called goes into a row that stays locked until the outcome is decided. Who may be creating the same
-- objects meets at one of some rows: an INSERT would wait for however long. Then objects are locked, in the order of
-- their oids; no row can be locked shared, so what was only read is locked as what is written.
-- A lock of the table is shared until the commit: whoever begins a sweep waits for those that have voted. Before the
-- commit lock: those who hold this lock wait for that one.
-- What follows sees what is committed now. First how many objects are not as they were read, then whether what the
-- transaction stands on is gone: see proof.py.
-- name: vote (begun, alone, in_line, session, vote, stripes, locks, bases, at) [hp]
BEGIN
{begin_vote}
SELECT (SELECT count(*) FROM {changed}) || ' ' || ({epoch}) || ' ' ||
    (SELECT coalesce(max(t.tid), 0) FROM {transaction} t) || ' ' || w.number || ' ' || {sweep_told} || ' ' ||
    CASE WHEN $at > w.packed_to AND NOT EXISTS (SELECT 1 FROM {transaction} t WHERE t.tid = $at) THEN 1 ELSE 0 END
INTO :told FROM {relstore_sweep} w;
OPEN :rows FOR SELECT d.zoid, d.tid, CASE WHEN ROWNUM <= {together} THEN s.state END AS state
FROM (SELECT b.zoid, coalesce(c.tid, 0) AS tid FROM {changed}) d
    LEFT JOIN {object_state} s ON s.zoid = d.zoid AND s.tid = d.tid;
END;

-- name: vote (begun, alone, in_line, session, vote, stripes, locks, bases, known) [hf]
BEGIN
{begin_vote}
SELECT (SELECT count(*) FROM {changed}) || ' ' || ({epoch}) || ' ' ||
    (SELECT coalesce(max(t.tid), 0) FROM {object_state} t) || ' ' || w.number || ' ' || {sweep_told} || ' ' ||
    CASE WHEN EXISTS (SELECT 1 FROM {known_revisions} k JOIN {object_state} c ON c.zoid = k.zoid WHERE c.tid < k.tid)
         THEN 1 ELSE 0 END
INTO :told FROM {relstore_sweep} w;
OPEN :rows FOR SELECT b.zoid, coalesce(c.tid, 0) AS tid, CASE WHEN ROWNUM <= {together} THEN c.state END AS state
FROM {changed};
END;

-- macro: changed
{bases} b LEFT JOIN {current} c ON c.zoid = b.zoid WHERE coalesce(c.tid, 0) <> b.tid

-- macro: begin_vote
IF $begun = 0 THEN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
END IF;
MERGE INTO {relstore_commit} c
USING (SELECT CAST($session AS NUMBER(20)) AS session_key FROM dual) k ON (c.session_key = k.session_key)
WHEN MATCHED THEN UPDATE SET vote = $vote, tid = 0, voted = {now_seconds}
WHEN NOT MATCHED THEN INSERT (session_key, vote, tid, voted) VALUES ($session, $vote, 0, {now_seconds});
FOR r IN (SELECT l.zoid FROM {relstore_lock} l
    WHERE l.zoid IN (SELECT CAST(x.column_value AS NUMBER(20)) FROM {list_of}$stripes {listed} x)
    ORDER BY l.zoid FOR UPDATE WAIT 10) LOOP NULL; END LOOP;
FOR r IN (SELECT c.zoid FROM {current} c
    WHERE c.zoid IN (SELECT CAST(x.column_value AS NUMBER(20)) FROM {list_of}$locks {listed} x)
    ORDER BY c.zoid FOR UPDATE WAIT 10) LOOP NULL; END LOOP;
IF $alone = 1 THEN
LOCK TABLE {relstore_sweep} IN EXCLUSIVE MODE WAIT 10;
ELSE
LOCK TABLE {relstore_sweep} IN ROW SHARE MODE WAIT 10;
END IF;
IF $in_line = 1 THEN
FOR r IN (SELECT l.tid FROM {commit_row_lock} l FOR UPDATE WAIT 10) LOOP NULL; END LOOP;
END IF;

-- macro: bases
(SELECT /*+ CARDINALITY(l 10) */ CAST(substr(l.column_value, 1, 20) AS NUMBER(20)) AS zoid,
    CAST(substr(l.column_value, 21) AS NUMBER(20)) AS tid FROM {list_of}$bases {listed} l)

-- macro: known_revisions
(SELECT /*+ CARDINALITY(l 10) */ CAST(substr(l.column_value, 1, 20) AS NUMBER(20)) AS zoid,
    CAST(substr(l.column_value, 21) AS NUMBER(20)) AS tid FROM {list_of}$known {listed} l)

-- Who had the lock that was not free in time? Asked when the transaction is over.
-- name: lock_free (oids)
SELECT c.zoid FROM {current} c WHERE c.zoid IN (SELECT o.zoid FROM {oids} o) FOR UPDATE SKIP LOCKED

-- Temporary: what a session puts there it alone sees, and it is gone at the end of the transaction.
-- name: stage (oid, md5, size, data_tid, refs, state)
INSERT INTO {relstore_stage} (zoid, md5, state_size, data_tid, refs, state)
VALUES ($oid, $md5, $size, $data_tid, $refs, $state)

-- name: unstage (oid)
DELETE FROM {relstore_stage} WHERE zoid = $oid

-- name: stage_chunk (oid, chunk_num, chunk)
INSERT INTO {relstore_stage_chunk} (zoid, chunk_num, chunk) VALUES ($oid, $chunk_num, $chunk)

-- name: stage_record (oid, size, digest)
INSERT INTO {relstore_stage_record} (zoid, size, digest) VALUES ($oid, $size, $digest)

-- name: repeat_chunks (revisions) [hp]
INSERT INTO {relstore_stage_chunk} (zoid, chunk_num, chunk)
SELECT b.zoid, b.chunk_num, b.chunk FROM {revisions} g JOIN {blob_chunk} b ON b.zoid = g.zoid AND b.tid = g.tid

-- name: repeat_records (revisions) [hp]
INSERT INTO {relstore_stage_record} (zoid, size, digest)
SELECT b.zoid, b.size, b.digest FROM {revisions} g JOIN {relstore_blob} b ON b.zoid = g.zoid AND b.tid = g.tid

-- There is no tid where the transaction that has voted is gone: that is an error, so that nothing can be written.
-- macro: choose_tid
FOR r IN (SELECT l.tid FROM {commit_row_lock} l FOR UPDATE WAIT 600) LOOP NULL; END LOOP;
SELECT CASE WHEN $restored_tid > 0 THEN $restored_tid
    ELSE greatest((SELECT coalesce(max(t.tid), 0) FROM {last} t) + 1, {clock}) END
INTO new_tid FROM {relstore_commit} c CROSS JOIN {now} WHERE c.session_key = $session AND c.vote = $vote;

-- name: choose_tid (restored_tid, session, vote)
DECLARE
new_tid NUMBER(20);
BEGIN
{choose_tid}
:told := new_tid;
END;

-- macro: end_finish
UPDATE {relstore_commit} SET tid = new_tid WHERE session_key = $session;
:told := new_tid;
COMMIT WRITE IMMEDIATE WAIT;

-- name: finish (restored_tid, session, vote, packed, username, description, extension) [hp]
DECLARE
new_tid NUMBER(20);
BEGIN
{choose_tid}
INSERT INTO {transaction} (tid, packed, username, description, extension)
VALUES (new_tid, CASE WHEN $packed = 1 THEN 'Y' ELSE 'N' END, $username, $description, $extension);
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
SELECT g.zoid, new_tid, coalesce((SELECT c.tid FROM {current_object} c WHERE c.zoid = g.zoid), 0), g.md5, g.state_size,
    g.state, g.refs, g.data_tid FROM {relstore_stage} g;
MERGE INTO {current_object} c USING (SELECT zoid FROM {relstore_stage}) g ON (c.zoid = g.zoid)
WHEN MATCHED THEN UPDATE SET tid = new_tid WHEN NOT MATCHED THEN INSERT (zoid, tid) VALUES (g.zoid, new_tid);
{finish_blobs}
{end_finish}
END;

-- Of an object that is deleted the blob goes, too.
-- name: finish (restored_tid, session, vote) [hf]
DECLARE
new_tid NUMBER(20);
BEGIN
{choose_tid}
DELETE FROM {blob_chunk} WHERE zoid IN (
    SELECT zoid FROM {relstore_stage_chunk} UNION ALL SELECT zoid FROM {relstore_stage} WHERE state IS NULL);
DELETE FROM {relstore_blob} WHERE zoid IN (
    SELECT zoid FROM {relstore_stage_record} UNION ALL SELECT zoid FROM {relstore_stage} WHERE state IS NULL);
MERGE INTO {object_state} s
USING (SELECT zoid, state_size, state, refs FROM {relstore_stage}) g ON (s.zoid = g.zoid)
WHEN MATCHED THEN UPDATE SET tid = new_tid, state_size = g.state_size, state = g.state, refs = g.refs,
    refs_tid = new_tid
WHEN NOT MATCHED THEN INSERT (zoid, tid, state_size, state, refs, refs_tid)
VALUES (g.zoid, new_tid, g.state_size, g.state, g.refs, new_tid);
{finish_blobs}
{end_finish}
END;

-- macro: finish_blobs
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk)
SELECT zoid, new_tid, chunk_num, chunk FROM {relstore_stage_chunk};
INSERT INTO {relstore_blob} (zoid, tid, size, digest)
SELECT zoid, new_tid, size, digest FROM {relstore_stage_record};

-- Copied transactions, each with its own tid.
-- name: insert_transaction (new_tid, packed, username, description, extension) [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension)
VALUES ($new_tid, CASE WHEN $packed = 1 THEN 'Y' ELSE 'N' END, $username, $description, $extension)

-- name: insert_copy (oid, new_tid, prev_tid, md5, size, data_tid, refs, state) [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, data_tid, refs, state)
VALUES ($oid, $new_tid, $prev_tid, $md5, $size, $data_tid, $refs, $state)

-- name: current_tids_of (oids) [hp]
SELECT c.zoid, c.tid FROM {oids} o JOIN {current_object} c ON c.zoid = o.zoid

-- name: point_copied (oid, tid) [hp]
MERGE INTO {current_object} c USING (SELECT CAST($oid AS NUMBER(20)) AS zoid FROM dual) g ON (c.zoid = g.zoid)
WHEN MATCHED THEN UPDATE SET tid = $tid WHEN NOT MATCHED THEN INSERT (zoid, tid) VALUES (g.zoid, $tid)

-- name: stage_copy (oid, new_tid, size, refs, state) [hf]
INSERT INTO {relstore_stage} (zoid, data_tid, state_size, refs, state) VALUES ($oid, $new_tid, $size, $refs, $state)

-- name: merge_copies [hf]
MERGE INTO {object_state} s
USING (SELECT zoid, data_tid, state_size, state, refs FROM {relstore_stage}) g ON (s.zoid = g.zoid)
WHEN MATCHED THEN UPDATE SET tid = g.data_tid, state_size = g.state_size, state = g.state, refs = g.refs,
    refs_tid = g.data_tid
WHEN NOT MATCHED THEN INSERT (zoid, tid, state_size, state, refs, refs_tid)
VALUES (g.zoid, g.data_tid, g.state_size, g.state, g.refs, g.data_tid)

-- name: finish_copies (restored_tid, session, vote)
DECLARE
new_tid NUMBER(20);
BEGIN
{choose_tid}
{end_finish}
END;

-- Waits until the transaction is decided. The commit of our own is for what was asked about: it must be on disk too.
-- name: outcome (session, vote)
SELECT tid FROM {relstore_commit} WHERE session_key = $session AND vote = $vote FOR UPDATE WAIT 10

-- name: make_durable (session)
BEGIN
UPDATE {relstore_commit} SET voted = {now_seconds} WHERE session_key = $session;
COMMIT WRITE IMMEDIATE WAIT;
END;

-- name: new_oids (count)
SELECT {zoid_seq}.NEXTVAL FROM {upto_count} n

-- In a transaction of its own, for to change a sequence commits. It never goes back: whoever raises it has a lock.
-- name: lock_oids
SELECT l.zoid FROM {relstore_lock} l WHERE l.zoid = -1 FOR UPDATE WAIT 30

-- name: last_number
SELECT last_number FROM user_sequences WHERE sequence_name = 'ZOID_SEQ'

-- name: restart_oids (block)
DECLARE
PRAGMA AUTONOMOUS_TRANSACTION;
BEGIN
EXECUTE IMMEDIATE 'ALTER SEQUENCE {zoid_seq} RESTART START WITH ' || $block;
END;

-- Packing ------------------------------------------------------------------------------------------------------

-- A large object is sent in VALUES alone, as a value: so a row takes the place of another by two statements.
-- name: forget_references (oid, tid) [hp]
DELETE FROM {relstore_refs} WHERE zoid = $oid AND tid = $tid

-- name: forget_references (oid) [hf]
DELETE FROM {relstore_refs} WHERE zoid = $oid

-- name: save_references (oid, tid, refs)
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_refs} ({key_of_refs})) */ INTO {relstore_refs} (zoid, tid, refs)
VALUES ($oid, $tid, $refs)

-- macro: key_of_refs [hp]
zoid, tid

-- macro: key_of_refs [hf]
zoid

-- name: add_garbage (pack_id, oid, tid, since, goes)
INSERT INTO {relstore_garbage} (pack_id, zoid, tid, since, goes) VALUES ($pack_id, $oid, $tid, $since, $goes)

-- name: spare (oids, pack_id)
UPDATE {relstore_garbage} SET goes = {goes_spared} WHERE pack_id = $pack_id AND zoid IN (SELECT o.zoid FROM {oids} o)

-- name: forget_garbage (pack_id, keep)
DELETE FROM {relstore_garbage} WHERE abs(pack_id) NOT IN ($pack_id, $keep)
    AND abs(pack_id) NOT IN (SELECT sweeping FROM {relstore_sweep}) AND ROWNUM <= 10000

-- name: take_marks (oids, pack_id) [hf]
INSERT /*+ IGNORE_ROW_ON_DUPKEY_INDEX({relstore_garbage} (pack_id, zoid)) */
INTO {relstore_garbage} (pack_id, zoid, tid, since, goes)
SELECT -p.pack_id, o.zoid, 0, 0, {goes_spared} FROM {relstore_pack} p CROSS JOIN {oids} o WHERE p.pack_id = $pack_id
    AND NOT EXISTS (SELECT 1 FROM {relstore_garbage} x WHERE x.pack_id = -p.pack_id AND x.zoid = o.zoid)

-- RelStorage's lock of packs. It lasts as long as a transaction.
-- name: lock_pack
LOCK TABLE pack_lock IN EXCLUSIVE MODE NOWAIT

-- name: lock_votes
BEGIN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
LOCK TABLE {relstore_sweep} IN EXCLUSIVE MODE WAIT 10;
END;

-- A batch of a sweep. First what is to be counted; then, of objects that go, the current tid, and states where there is
-- none; then the older states of objects that stay.
-- name: sweep (pack_id, oid, upto_oid) [hp]
BEGIN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
DELETE FROM {current_object} WHERE (zoid, tid) IN (
    SELECT g.zoid, g.tid FROM {relstore_garbage} g WHERE {in_batch} AND g.goes = {goes_object});
SELECT count(*) || ' ' || coalesce(sum(s.state_size), 0) || ' ' || count(r.zoid) || ' ' || coalesce(sum(r.size), 0)
INTO :told FROM {relstore_garbage} g JOIN {object_state} s ON s.zoid = g.zoid AND s.tid < g.tid + g.goes - 1
    LEFT JOIN {current_object} c ON c.zoid = g.zoid AND g.goes = {goes_object}
    LEFT JOIN {relstore_blob} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE {in_batch} AND g.goes > {goes_later} AND c.zoid IS NULL;
DELETE FROM {object_state} WHERE (zoid, tid) IN (
    SELECT s.zoid, s.tid
    FROM {relstore_garbage} g JOIN {object_state} s ON s.zoid = g.zoid AND s.tid < g.tid + g.goes - 1
        LEFT JOIN {current_object} c ON c.zoid = g.zoid AND g.goes = {goes_object}
    WHERE {in_batch} AND g.goes > {goes_later} AND c.zoid IS NULL);
DELETE FROM {relstore_refs} WHERE (zoid, tid) IN (
    SELECT r.zoid, r.tid
    FROM {relstore_garbage} g JOIN {relstore_refs} r ON r.zoid = g.zoid AND r.tid < g.tid + g.goes - 1
    WHERE {in_batch} AND g.goes > {goes_later});
COMMIT;
END;

-- name: sweep (pack_id, oid, upto_oid) [hf]
BEGIN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SELECT count(*) || ' ' || coalesce(sum(s.state_size), 0) || ' ' || count(r.zoid) || ' ' || coalesce(sum(r.size), 0)
INTO :told FROM {relstore_garbage} g JOIN {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid
    LEFT JOIN {relstore_blob} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE {in_batch} AND g.goes = {goes_object};
DELETE FROM {object_state} WHERE (zoid, tid) IN (
    SELECT g.zoid, g.tid FROM {relstore_garbage} g WHERE {in_batch} AND g.goes = {goes_object});
DELETE FROM {relstore_refs} WHERE (zoid, tid) IN (
    SELECT g.zoid, g.tid FROM {relstore_garbage} g WHERE {in_batch} AND g.goes = {goes_object});
COMMIT;
END;

-- The newest row is left alone, for who chooses the next tid.
-- name: forget_transactions (tid, upto_tid, named) [hp]
BEGIN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
UPDATE {object_state} s SET prev_tid = 0 WHERE $named = 1 AND s.prev_tid > $tid AND s.prev_tid <= $upto_tid
    AND NOT EXISTS (SELECT 1 FROM {object_state} r WHERE r.zoid = s.zoid AND r.tid = s.prev_tid);
DELETE FROM {transaction} t WHERE t.tid > $tid AND t.tid <= $upto_tid AND t.tid > 0
    AND t.tid < (SELECT max(n.tid) FROM {transaction} n)
    AND NOT EXISTS (SELECT 1 FROM {object_state} s WHERE s.tid = t.tid)
    AND NOT ($named = 1 AND EXISTS (SELECT 1 FROM {object_state} s WHERE s.prev_tid = t.tid));
:told := SQL%ROWCOUNT;
UPDATE {transaction} SET packed = 'Y' WHERE tid > $tid AND tid <= $upto_tid AND tid > 0 AND packed = 'N';
COMMIT;
END;

-- name: has_foreign_key [hp]
SELECT count(*) FROM user_constraints WHERE table_name = 'OBJECT_STATE' AND constraint_type = 'R'

-- Administration -----------------------------------------------------------------------------------------------

-- It is always there.
-- name: index_for_relstorage [hp]
BEGIN
NULL;
END;

-- name: size
SELECT coalesce(sum(bytes), 0) FROM user_segments

-- name: estimated_count [hp]
SELECT coalesce(max(num_rows), 0) FROM user_tables WHERE table_name = 'CURRENT_OBJECT'

-- name: estimated_count [hf]
SELECT coalesce(max(num_rows), 0) FROM user_tables WHERE table_name = 'OBJECT_STATE'

-- name: zap [hp]
BEGIN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
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
COMMIT;
END;

-- name: zap [hf]
BEGIN
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
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
COMMIT;
END;
