-- What MySQL and MariaDB say otherwise.
--   $in_oids, $in_tids: lists of values in parentheses, after IN. Where statements have several rows of VALUES, the row is
--   repeated.

-- Macros -------------------------------------------------------------------------------------------------------

-- Types of columns, and a value of one.
-- macro: id
BIGINT

-- macro: integer
SIGNED

-- macro: bytes
LONGBLOB

-- macro: chunk
LONGBLOB

-- macro: bool
BOOLEAN

-- macro: no
FALSE

-- macro: md5
CHAR(32) CHARACTER SET ascii

-- macro: digest
BINARY(32)

-- macro: text
VARCHAR(100) CHARACTER SET ascii

-- macro: oids
JSON_TABLE($oids, '$[*]' COLUMNS (zoid BIGINT PATH '$'))

-- macro: revisions
JSON_TABLE($revisions, '$[*]' COLUMNS (zoid BIGINT PATH '$[0]', tid BIGINT PATH '$[1]'))

-- macro: then
STRAIGHT_JOIN

-- macro: insert_new
INSERT IGNORE

-- macro: or_leave

-- No index serves a comparison of rows; MariaDB knows this alternative to one only as it is written here.
-- macro: after [hp]
(s.zoid > $oid OR s.zoid = $oid AND s.tid > $tid)

-- macro: epoch
SELECT CONCAT({epoch_value}, '.', {version}, '.', {server_name})

-- macro: epoch_written
(SELECT value FROM {relstore_epoch})

-- On a replica that was restarted, and which nobody may write, there is none.
-- macro: epoch_written_or_none
coalesce({epoch_written}, '')

-- macro: server_name
@@server_uuid

-- MySQL shows statistics of yesterday, unless it is told not to.
-- macro: fresh
SET SESSION information_schema_stats_expiry = 0;

-- The pack_id of a sweep under way; else what was deleted, the sign turned.
-- macro: sweep_told
CASE WHEN sweeping > 0 THEN sweeping ELSE -deleted END

-- In a cluster a lock is that of one server, but no two can write one row at once. So there all commits write one
-- before the tid is chosen: else one could become visible after another with a larger tid, and readers, who ask for what
-- came after the newest they know, would never learn of it; see test_galera.
-- macro: write_in_order
INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES (0, 0, 0, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE vote = vote + 1, voted = VALUES(voted)

-- What is written before the vote refers to nothing yet. For this statement alone: where a session forgot to go back, what
-- is removed would leave its chunks behind.
-- macro: insert_ahead
INSERT /*+ SET_VAR(foreign_key_checks = OFF) */ INTO

-- Chunks that wait for their oid and tid. By a join with nothing but the first column of the key: a range would wait for
-- the row after it, which may be another commit's.
-- macro: waiting_chunks
JSON_TABLE($waiting, '$[*]' COLUMNS (zoid BIGINT PATH '$[0]', place BIGINT PATH '$[1]')) w
    STRAIGHT_JOIN {chunks_ahead} b FORCE INDEX (PRIMARY) ON b.zoid = w.place

-- Where they wait, and how they get it: see mysql_blobs.py.
-- macro: make_chunks_moved
DO 0

-- macro: take_chunks_moved
UPDATE {waiting_chunks} SET b.zoid = w.zoid, b.tid = @relstore_tid

-- macro: make_chunks_copied
DROP TEMPORARY TABLE IF EXISTS relstore_chunk;
CREATE TEMPORARY TABLE relstore_chunk (zoid {id} NOT NULL, tid {id} NOT NULL, chunk_num {id} NOT NULL,
    chunk {chunk} NOT NULL, PRIMARY KEY (zoid, chunk_num)) ENGINE=InnoDB

-- macro: take_chunks_copied
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk)
SELECT w.zoid, @relstore_tid, b.chunk_num, b.chunk FROM {waiting_chunks};
DROP TEMPORARY TABLE relstore_chunk

-- Connecting ---------------------------------------------------------------------------------------------------

-- What a server's settings may have changed in new sessions; no statement relies on more than this. Not DEFAULT, which
-- is what they have set. The others: see mysql_settings.py.
-- name: begin_session
SET SESSION autocommit = 1, sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', completion_type = 'NO_CHAIN',
    sql_select_limit = 18446744073709551615, sql_big_selects = 1{settings};
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE

-- name: server
SHOW GLOBAL VARIABLES

-- name: has_innodb
SELECT 1 FROM information_schema.engines WHERE engine = 'InnoDB' AND support IN ('YES', 'DEFAULT')

-- name: engines
SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE() AND engine <> 'InnoDB'

-- These change nothing, but need the rights that a user is to have: see rights.py.
-- name: may_read
{may_read}

-- name: may_run
{may_run}

-- name: may_pack
{may_pack}

-- These need the rights to create, and fail: of a column there are two, or it is not there, nor is the table. Without the
-- rights they fail sooner.
-- name: may_create_table
CREATE TABLE relstore_trial (one INTEGER, one INTEGER)

-- name: may_refer
CREATE TABLE relstore_trial (zoid BIGINT, zoid BIGINT, FOREIGN KEY (zoid) REFERENCES {object_state} (zoid))

-- name: may_create_view
CREATE VIEW relstore_trial AS SELECT two FROM (SELECT 1 AS one) o

-- name: may_fill
INSERT INTO relstore_trial (one) SELECT one FROM relstore_trial

-- name: current_user
SELECT CURRENT_USER()

-- name: relations
SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()

-- name: columns
SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = DATABASE()

-- Ends with its session, at the latest.
-- name: lock_schema (timeout)
SELECT GET_LOCK(CONCAT('relstore.', LEFT(DATABASE(), 50)), $timeout)

-- name: unlock_schema
UNLOCK TABLES;
SET SESSION lock_wait_timeout = DEFAULT, innodb_lock_wait_timeout = DEFAULT;
DO RELEASE_LOCK(CONCAT('relstore.', LEFT(DATABASE(), 50)))

-- Behind a statement that waits to change a table all others wait who use it.
-- name: be_impatient
SET SESSION lock_wait_timeout = 1, innodb_lock_wait_timeout = 1

-- Who uses a table? Not everybody may see this, nor that.
-- name: table_holders (table)
SELECT DISTINCT t.processlist_id, t.processlist_user, t.processlist_host,
    CAST(e.timer_wait DIV 1000000000000 AS SIGNED) AS seconds
FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id
    LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = m.owner_thread_id AND e.state = 'ACTIVE'
WHERE m.object_schema = DATABASE() AND m.object_name = $table AND m.lock_status = 'GRANTED'
    AND t.processlist_id <> CONNECTION_ID()
ORDER BY seconds DESC LIMIT 3

-- name: open_transactions
SELECT p.id, p.user, p.host, TIMESTAMPDIFF(SECOND, t.trx_started, NOW())
FROM information_schema.innodb_trx t JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()
ORDER BY t.trx_started LIMIT 3

-- name: forget_epoch
DELETE FROM {relstore_epoch}

-- It has other words for a row that takes the place of another.
-- name: set_meta (name, value)
INSERT INTO {relstore_meta} (name, value) VALUES ($name, $value) ON DUPLICATE KEY UPDATE value = VALUES(value)

-- Locked until they are deleted: a session that has been idle for a day may vote at any time.
-- name: old_commits
START TRANSACTION;
SELECT session FROM {relstore_commit} WHERE voted < UTC_TIMESTAMP() - INTERVAL 1 DAY AND session <> 0
LIMIT 1000 FOR UPDATE SKIP LOCKED

-- By the primary key: where most rows are to go, MariaDB would read the whole table, and wait for those that others lock.
-- name: forget_commits (oids)
DELETE c FROM {oids} o STRAIGHT_JOIN {relstore_commit} c FORCE INDEX (PRIMARY) ON c.session = o.zoid;
COMMIT

-- When the table was made: a restored one is another.
-- name: made
SELECT CAST(UNIX_TIMESTAMP(create_time) AS CHAR) FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name = 'relstore_epoch'

-- Transactions -------------------------------------------------------------------------------------------------

-- name: begin
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION

-- Reading ------------------------------------------------------------------------------------------------------

-- The order makes the index on tid the plan, whatever the statistics say.
-- name: poll (since, most) [hp]
SELECT ({epoch}), (SELECT coalesce(max(t.tid), 0) FROM {transaction} t), o.number,
    (SELECT coalesce(max(t.tid), 0) FROM {transaction} t WHERE t.tid <= $since), c.zoid, c.tid
FROM {relstore_sweep} o LEFT JOIN
    (SELECT zoid, tid FROM {current_object} WHERE tid > $since ORDER BY tid LIMIT $most) c ON o.one = 1

-- name: poll (since, most) [hf]
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY;
SELECT ({epoch}), (SELECT coalesce(max(t.tid), 0) FROM {object_state} t), o.number,
    (SELECT coalesce(max(t.tid), 0) FROM {object_state} t WHERE t.tid <= $since), c.zoid, c.tid
FROM {relstore_sweep} o LEFT JOIN
    (SELECT zoid, tid FROM {object_state} WHERE tid > $since ORDER BY tid LIMIT $most) c ON o.one = 1

-- Without a tid and a state for those that have changed since.
-- name: load_many (oids, at, largest, first) [hp]
SELECT c.zoid, s.state, s.tid, s.refs FROM {oids} o STRAIGHT_JOIN {current_object} c ON c.zoid = o.zoid
    LEFT JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid AND s.tid <= $at
WHERE s.tid IS NULL OR s.state_size <= $largest OR s.zoid = $first

-- name: load_older (oid, at, largest, first) [hp]
SELECT zoid, state, tid, refs FROM
    (SELECT zoid, state, tid, refs, state_size FROM {object_state} WHERE zoid = $oid AND tid <= $at
     ORDER BY tid DESC LIMIT 1) s
WHERE state_size <= $largest OR zoid = $first

-- MySQL 9.7 without statistics walks the index on tid from its end, unless it is told not to.
-- name: undo (tid) [hp]
SELECT u.zoid, u.md5, c.tid, s.md5, u.prev_tid,
       (SELECT p.tid FROM {object_state} p FORCE INDEX (PRIMARY) WHERE p.zoid = u.zoid AND p.tid < u.tid
        ORDER BY p.tid DESC LIMIT 1)
FROM {object_state} u STRAIGHT_JOIN {current_object} c ON c.zoid = u.zoid
     STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE u.tid = $tid ORDER BY u.zoid

-- Each time with the number of the last.
-- name: chunk_rows (oid, tid, number, start, size, limit)
SELECT (SELECT max(l.chunk_num) FROM {blob_chunk} l WHERE l.zoid = $oid AND l.tid = $tid),
    b.chunk_num, length(b.chunk), substr(b.chunk, CASE WHEN b.chunk_num = $number THEN $start ELSE 1 END, $size),
    r.size, r.digest
FROM {blob_chunk} b LEFT JOIN {relstore_blob} r ON r.zoid = b.zoid AND r.tid = b.tid
WHERE b.zoid = $oid AND b.tid = $tid AND b.chunk_num >= $number
ORDER BY b.chunk_num LIMIT $limit

-- Objects of blobs: see objects.py. ------------------------------------------------------------------------------

-- macro: now_seconds
UNIX_TIMESTAMP()

-- macro: hold
LOCK IN SHARE MODE

-- macro: lock_if_free
FOR UPDATE SKIP LOCKED

-- From left to right: the version by the state that was there.
-- name: want_object (digest, version, size, wisher)
INSERT INTO {relstore_digest} (digest, version, size, wanted, wisher, state)
VALUES ($digest, $version, $size, {now_seconds}, $wisher, {object_used})
ON DUPLICATE KEY UPDATE version = CASE WHEN state = {object_goes} THEN $version ELSE version END,
    wanted = {now_seconds}, wisher = $wisher, state = {object_used}

-- Committing: one message for vote, one for finish. -------------------------------------------------------------

-- Locks by primary key in READ COMMITTED lock rows and no gaps, so new objects never wait for their neighbours. A
-- locking read sees what is committed now, also after it has waited. The row in relstore_commit stays locked until the
-- outcome is decided.
-- name: begin_vote (timeout, session, vote)
SET SESSION innodb_lock_wait_timeout = $timeout, lock_wait_timeout = $timeout, @relstore_outdated = 0;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES ($session, $vote, 0, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE vote = VALUES(vote), tid = 0, voted = VALUES(voted)

-- The same in the transaction that begin_chunks has begun.
-- name: continue_vote (timeout, session, vote)
SET SESSION innodb_lock_wait_timeout = $timeout, lock_wait_timeout = $timeout, @relstore_outdated = 0;
INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES ($session, $vote, 0, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE vote = VALUES(vote), tid = 0, voted = VALUES(voted)

-- Is one of few objects not as it was read, for certain? What follows waits for no object then, and what was read is
-- looked at again with its locks. As a query: where SET has a subquery, rows may be locked.
-- name: look_at_reads (count, in_oids, in_tids)
SELECT count(*) <> $count INTO @relstore_outdated FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids AND tid IN $in_tids

-- What is not there cannot be locked, so a row for each stands for objects that others may be creating. A row that
-- was deleted is locked as long as one that is there, and need not be removed by anyone. By a join: a DELETE with IN
-- waits for its neighbours' rows as well (MariaDB 10.11, MySQL 9.7; see test_mysql, NobodyWaits).
-- name: lock_created (oid, oids)
SET @relstore_began = SYSDATE(6);
INSERT INTO {relstore_lock} (zoid) VALUES ($oid) ON DUPLICATE KEY UPDATE zoid = VALUES(zoid);
DELETE l FROM {oids} o STRAIGHT_JOIN {relstore_lock} l ON l.zoid = o.zoid;
SELECT 'created', 0, 0, TIMESTAMPDIFF(MICROSECOND, @relstore_began, SYSDATE(6))

-- Rows come as they are locked, so each tells when it was: NOW() is the time of the statement, SYSDATE() that of the row.
-- name: lock_current (in_oids)
SELECT 'current', zoid, tid, TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))
FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids AND coalesce(@relstore_outdated, 0) = 0 ORDER BY zoid FOR UPDATE

-- Shared locks come last and never wait: waiting for one while holding others deadlocks. By the primary key, because
-- a row that is locked there may not be skipped by another index.
-- name: lock_read (in_oids)
SELECT 'shared', zoid, tid, 0 FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids ORDER BY zoid FOR SHARE SKIP LOCKED;
SELECT 'read', zoid, tid, 0 FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids

-- Who had the lock that was not free in time? Asked when the transaction is over.
-- name: lock_free (in_oids)
SELECT 'free', zoid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids ORDER BY zoid FOR UPDATE SKIP LOCKED;
SELECT 'there', zoid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids

-- Not everybody may see this.
-- name: lock_holders (oid)
SELECT t.processlist_id, t.processlist_user, t.processlist_host, CAST(e.timer_wait DIV 1000000000000 AS SIGNED)
FROM performance_schema.data_locks l JOIN performance_schema.threads t ON t.thread_id = l.thread_id
    LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = l.thread_id AND e.state = 'ACTIVE'
WHERE l.object_schema = DATABASE() AND l.object_name = '{current}' AND l.index_name = 'PRIMARY'
    AND l.lock_data = $oid AND l.lock_status = 'GRANTED' AND t.processlist_id <> CONNECTION_ID()
ORDER BY e.timer_wait DESC LIMIT 1

-- Who has the row that a connection waits for in this moment; those who wait themselves come last. A prepared
-- transaction has no connection. Not everybody may see this.
-- name: blockers (connection)
SELECT h.processlist_id, h.processlist_user, h.processlist_host,
    CAST(max(e.timer_wait) DIV 1000000000000 AS SIGNED) AS seconds
FROM performance_schema.threads t JOIN performance_schema.data_lock_waits w ON w.requesting_thread_id = t.thread_id
    JOIN performance_schema.data_locks l ON l.engine_lock_id = w.blocking_engine_lock_id
    LEFT JOIN performance_schema.threads h ON h.thread_id = w.blocking_thread_id
    LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = h.thread_id AND e.state = 'ACTIVE'
WHERE t.processlist_id = $connection
GROUP BY h.processlist_id, h.processlist_user, h.processlist_host
ORDER BY min(l.lock_status), seconds DESC LIMIT 3

-- What a connection has waited for, for a second; an empty text for the commit lock: to take that takes no time else.
-- name: waits_for (connection)
SELECT CASE WHEN state LIKE 'Waiting for %' THEN state ELSE '' END FROM information_schema.processlist
WHERE id = $connection AND time >= 1 AND (state LIKE 'Waiting for %' OR info LIKE '%FROM {commit_row_lock} FOR UPDATE')

-- A vote writes tid 0, and finish the tid.
-- name: unfinished (session)
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
SELECT count(*), TIMESTAMPDIFF(SECOND, min(voted), UTC_TIMESTAMP(6)) FROM {relstore_commit}
WHERE tid = 0 AND vote <> 0 AND session <> $session

-- name: lock_commit
SELECT 'commit', tid, 0, TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) FROM {commit_row_lock} FOR UPDATE

-- As of any version.
-- name: has_sweep
SELECT 1 FROM {relstore_sweep}

-- Shared until the commit: whoever begins a sweep waits for those that have voted.
-- name: lock_sweep
SELECT 'sweep', number, {sweep_told}, 0 FROM {relstore_sweep} LOCK IN SHARE MODE

-- Deletions keep all other commits out: see Transaction.
-- name: lock_sweep_alone
SELECT 'sweep', number, {sweep_told}, 0 FROM {relstore_sweep} FOR UPDATE

-- The last is whether what the transaction stands on is gone, see proof.py.
-- name: voted (at) [hp]
SELECT ({epoch}), (SELECT coalesce(max(tid), 0) FROM {transaction}), CONNECTION_ID(),
    $at > (SELECT packed_to FROM {relstore_sweep}) AND NOT EXISTS (SELECT 1 FROM {transaction} t WHERE t.tid = $at)

-- name: voted (revisions) [hf]
SELECT ({epoch}), (SELECT coalesce(max(tid), 0) FROM {object_state}), CONNECTION_ID(),
    EXISTS (SELECT 1 FROM {revisions} k STRAIGHT_JOIN {object_state} c ON c.zoid = k.zoid WHERE c.tid < k.tid)

-- name: current_states (in_oids) [hp]
SELECT c.zoid, c.tid, s.state FROM {current_object} c STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE c.zoid IN $in_oids

-- name: current_states (in_oids) [hf]
SELECT zoid, tid, state FROM {object_state} WHERE zoid IN $in_oids

-- Neither of these commits, unlike those for tables that are not temporary.
-- name: begin_stage
DROP TEMPORARY TABLE IF EXISTS relstore_stage;
CREATE TEMPORARY TABLE relstore_stage (zoid {id} NOT NULL PRIMARY KEY, prev_tid {id}, md5 {md5}, state_size {id},
    state {bytes}, refs {bytes}, data_tid {id}) ENGINE=InnoDB

-- name: stage (oid, prev_tid, md5, size, state, refs, data_tid)
INSERT INTO relstore_stage (zoid, prev_tid, md5, state_size, state, refs, data_tid) VALUES ($oid, $prev_tid, $md5, $size, $state, $refs, $data_tid)

-- name: begin_chunks
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
{make_chunks}

-- The same in a transaction that has begun.
-- name: make_chunks
{make_chunks}

-- name: send_chunks (place, chunk_num, chunk)
{insert_ahead} {chunks_ahead} (zoid, tid, chunk_num, chunk) VALUES ($place, 0, $chunk_num, $chunk)

-- name: repeat_chunks (copies) [hp]
{insert_ahead} {chunks_ahead} (zoid, tid, chunk_num, chunk)
SELECT r.place, 0, b.chunk_num, b.chunk
FROM JSON_TABLE($copies, '$[*]' COLUMNS (zoid BIGINT PATH '$[0]', tid BIGINT PATH '$[1]', place BIGINT PATH '$[2]')) r
    STRAIGHT_JOIN {blob_chunk} b FORCE INDEX (PRIMARY) ON b.zoid = r.zoid AND b.tid = r.tid

-- By a join, as in lock_created.
-- name: remove_chunks (oids) [hf]
DELETE b FROM {oids} o STRAIGHT_JOIN {blob_chunk} b FORCE INDEX (PRIMARY) ON b.zoid = o.zoid

-- name: take_chunks (waiting)
{take_chunks}

-- name: insert_chunks (oid, chunk_num, chunk)
INSERT INTO {blob_chunk} (zoid, tid, chunk_num, chunk) VALUES ($oid, @relstore_tid, $chunk_num, $chunk)

-- What is recorded of blobs goes the same ways.
-- name: send_records (place, size, digest)
{insert_ahead} {relstore_blob} (zoid, tid, size, digest) VALUES ($place, 0, $size, $digest)

-- name: remove_records (oids) [hf]
DELETE b FROM {oids} o STRAIGHT_JOIN {relstore_blob} b FORCE INDEX (PRIMARY) ON b.zoid = o.zoid

-- name: take_records (waiting)
UPDATE JSON_TABLE($waiting, '$[*]' COLUMNS (zoid BIGINT PATH '$[0]', place BIGINT PATH '$[1]')) w
    STRAIGHT_JOIN {relstore_blob} b FORCE INDEX (PRIMARY) ON b.zoid = w.place
SET b.zoid = w.zoid, b.tid = @relstore_tid

-- name: insert_records (oid, size, digest)
INSERT INTO {relstore_blob} (zoid, tid, size, digest) VALUES ($oid, @relstore_tid, $size, $digest)

-- name: repeat_records (revisions) [hp]
INSERT INTO {relstore_blob} (zoid, tid, size, digest)
SELECT b.zoid, @relstore_tid, b.size, b.digest
FROM {revisions} r STRAIGHT_JOIN {relstore_blob} b FORCE INDEX (PRIMARY) ON b.zoid = r.zoid AND b.tid = r.tid

-- ZODB's timestamp: minutes since 1900, counting 31 days to a month, then the fraction of the minute in 1/2^32. There
-- is no tid where the transaction that has voted is gone, so that nothing can be written.
-- name: begin_finish (timeout, restored_tid, session, vote)
SET SESSION innodb_lock_wait_timeout = $timeout, lock_wait_timeout = $timeout;
SELECT TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) INTO @relstore_waited FROM {commit_row_lock} FOR UPDATE;
{in_order}
SET @relstore_now = UTC_TIMESTAMP(6);
SET @relstore_tid = coalesce($restored_tid, greatest(
    CAST((SELECT coalesce(max(tid), 0) FROM {last}) AS SIGNED) + 1,
    CAST(((((YEAR(@relstore_now) - 1900) * 12 + MONTH(@relstore_now) - 1) * 31 + DAY(@relstore_now) - 1) * 24
          + HOUR(@relstore_now)) * 60 + MINUTE(@relstore_now) AS SIGNED) * 4294967296
    + CAST(SECOND(@relstore_now) * 1000000 + MICROSECOND(@relstore_now) AS SIGNED) * 4294967296 DIV 60000000));
SET @relstore_tid = IF(EXISTS(SELECT 1 FROM {relstore_commit} WHERE session = $session AND vote = $vote), @relstore_tid, NULL)

-- name: insert_transaction (packed, username, description, extension) [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension) VALUES (@relstore_tid, $packed, $username, $description, $extension)

-- name: insert_states (oid, prev_tid, md5, size, state, refs, data_tid) [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
VALUES ($oid, @relstore_tid, $prev_tid, $md5, $size, $state, $refs, $data_tid)

-- name: point_current (oid) [hp]
INSERT INTO {current_object} (zoid, tid) VALUES ($oid, @relstore_tid) ON DUPLICATE KEY UPDATE tid = VALUES(tid)

-- name: insert_states (oid, size, state, refs) [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
VALUES ($oid, @relstore_tid, $size, $state, $refs, @relstore_tid)
ON DUPLICATE KEY UPDATE tid = VALUES(tid), state_size = VALUES(state_size), state = VALUES(state), refs = VALUES(refs),
    refs_tid = VALUES(refs_tid)

-- name: insert_staged [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
SELECT zoid, @relstore_tid, prev_tid, md5, state_size, state, refs, data_tid FROM relstore_stage;
INSERT INTO {current_object} (zoid, tid) SELECT zoid, @relstore_tid FROM relstore_stage
ON DUPLICATE KEY UPDATE tid = VALUES(tid);
DROP TEMPORARY TABLE relstore_stage

-- name: insert_staged [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
SELECT zoid, @relstore_tid, state_size, state, refs, @relstore_tid FROM relstore_stage
ON DUPLICATE KEY UPDATE tid = VALUES(tid), state_size = VALUES(state_size), state = VALUES(state), refs = VALUES(refs),
    refs_tid = VALUES(refs_tid);
DROP TEMPORARY TABLE relstore_stage

-- Copied transactions, each with its own tid: see mysql_copies.py.
-- name: insert_transactions (new_tid, packed, username, description, extension) [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension) VALUES ($new_tid, $packed, $username, $description, $extension)

-- name: insert_copies (oid, new_tid, prev_tid, md5, size, state, refs, data_tid) [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
VALUES ($oid, $new_tid, $prev_tid, $md5, $size, $state, $refs, $data_tid)

-- name: insert_copies (oid, new_tid, size, state, refs) [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
VALUES ($oid, $new_tid, $size, $state, $refs, $new_tid)
ON DUPLICATE KEY UPDATE tid = VALUES(tid), state_size = VALUES(state_size), state = VALUES(state), refs = VALUES(refs),
    refs_tid = VALUES(refs_tid)

-- name: point_copied (oid, tid) [hp]
INSERT INTO {current_object} (zoid, tid) VALUES ($oid, $tid) ON DUPLICATE KEY UPDATE tid = VALUES(tid)

-- For what has to know it before the commit.
-- name: chosen_tid
SELECT @relstore_tid, @relstore_waited

-- The tid is returned before the COMMIT, but counts only where the whole message was answered.
-- name: end_finish (session, vote)
UPDATE {relstore_commit} SET tid = @relstore_tid WHERE session = $session AND vote = $vote;
SELECT @relstore_tid, @relstore_waited;
COMMIT

-- Waits until the transaction is decided. The commit of our own is for what was asked about: it must be on disk too. In a
-- cluster, where it may be open on another server still, it cannot be committed after the row was written here.
-- name: outcome (timeout, session, vote)
SET SESSION innodb_lock_wait_timeout = $timeout;
START TRANSACTION;
SELECT tid FROM {relstore_commit} WHERE session = $session AND vote = $vote FOR UPDATE;
INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES ($session, 0, 0, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE voted = VALUES(voted);
COMMIT

-- name: kill (connection)
KILL $connection

-- Rows are removed by whoever has made them: nobody waits for others, and the counter stays.
-- name: new_oids (count)
START TRANSACTION;
INSERT INTO {new_oid} (zoid) VALUES (NULL);
SET @relstore_first = LAST_INSERT_ID();
SELECT @relstore_first, @@auto_increment_increment;
DELETE FROM {new_oid} WHERE zoid >= @relstore_first AND zoid < @relstore_first + $count * @@auto_increment_increment;
COMMIT

-- name: reserve_oids (block)
INSERT IGNORE INTO {new_oid} (zoid) VALUES ($block);
DELETE FROM {new_oid} WHERE zoid = $block

-- Within a transaction: the counter stays ahead, while nobody has to wait for the row until the commit.
-- name: reserve_oids_at_once (block)
SAVEPOINT relstore_oids;
INSERT IGNORE INTO {new_oid} (zoid) VALUES ($block);
ROLLBACK TO SAVEPOINT relstore_oids

-- Of a pack, so that it conflicts with commits on other servers: see conflict_with_commits.
-- name: write_in_order
{write_in_order}

-- Packing ------------------------------------------------------------------------------------------------------

-- Nothing ends it but its end.
-- name: begin_snapshot
SET SESSION wait_timeout = 31536000, max_execution_time = 0;
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY

-- From an index alone, else MySQL 9.7 without statistics reads and sorts the whole table.
-- name: changes (tid, oid, limit)
SELECT {revision}
FROM (SELECT zoid, tid FROM {object_state} WHERE tid > $tid OR tid = $tid AND zoid > $oid ORDER BY tid, zoid {limit}) g
    {state_of_g} {found}
ORDER BY s.tid, s.zoid

-- name: save_references (oid, tid, refs) [hp]
INSERT IGNORE INTO {relstore_refs} (zoid, tid, refs) VALUES ($oid, $tid, $refs)

-- name: save_references (oid, tid, refs) [hf]
INSERT INTO {relstore_refs} (zoid, tid, refs) VALUES ($oid, $tid, $refs)
ON DUPLICATE KEY UPDATE tid = VALUES(tid), refs = VALUES(refs)

-- name: add_garbage (pack_id, oid, tid, since, goes)
INSERT INTO {relstore_garbage} (pack_id, zoid, tid, since, goes) VALUES ($pack_id, $oid, $tid, $since, $goes)

-- RelStorage's tids of transactions are unsigned, and so is what is subtracted from them.
-- name: tell_deletion [hp]
UPDATE {relstore_sweep} SET deleted = 1 + CAST((SELECT max(tid) FROM {transaction}) AS SIGNED)

-- name: pack_swept (pack_id)
UPDATE {relstore_pack} p, {relstore_sweep} s SET p.progress = 'swept', p.number = s.number,
    p.objects = (SELECT count(*) FROM {relstore_garbage} g WHERE g.pack_id = $pack_id AND g.goes = {goes_object}) WHERE p.pack_id = $pack_id

-- name: spare (oids, pack_id)
UPDATE {oids} o STRAIGHT_JOIN {relstore_garbage} g ON g.zoid = o.zoid SET g.goes = {goes_spared} WHERE g.pack_id = $pack_id

-- name: forget_garbage (pack_id, keep)
DELETE FROM {relstore_garbage} WHERE abs(pack_id) NOT IN ($pack_id, $keep)
    AND abs(pack_id) NOT IN (SELECT sweeping FROM {relstore_sweep}) LIMIT 10000

-- A lock of the session, which is RelStorage's too. One that was closed just now may have it for a moment more.
-- name: lock_pack
SELECT GET_LOCK(CONCAT(DATABASE(), '.pack'), 1)

-- name: pack_holder
SELECT p.id, CONCAT(p.user, '@', p.host) FROM information_schema.processlist p
WHERE p.id = IS_USED_LOCK(CONCAT(DATABASE(), '.pack'))

-- A session that has the lock may be idle.
-- name: stay
SET SESSION wait_timeout = 31536000

-- name: lock_votes (timeout)
SET SESSION innodb_lock_wait_timeout = $timeout;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
SELECT number FROM {relstore_sweep} FOR UPDATE

-- name: lock_votes_at_once
SET SESSION innodb_lock_wait_timeout = 50;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
SELECT number FROM {relstore_sweep} FOR UPDATE NOWAIT

-- A batch of a sweep. First what is to be counted; then, of objects that go, the current tid, and states where there is
-- none; then the older states of objects that stay. In this order of tables, whatever the statistics say: nobody waits
-- for these rows.
-- name: sweep (pack_id, oid, upto_oid) [hp]
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
DELETE c FROM {relstore_garbage} g STRAIGHT_JOIN {current_object} c ON c.zoid = g.zoid AND c.tid = g.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes = {goes_object};
SELECT count(*), CAST(coalesce(sum(s.state_size), 0) AS SIGNED), count(r.zoid), CAST(coalesce(sum(r.size), 0) AS SIGNED)
FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid < g.tid + g.goes - 1
    LEFT JOIN {current_object} c ON c.zoid = g.zoid AND g.goes = {goes_object}
    LEFT JOIN {relstore_blob} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes > {goes_later} AND c.zoid IS NULL;
DELETE s FROM {relstore_garbage} g LEFT JOIN {current_object} c ON c.zoid = g.zoid
    STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid <= g.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes = {goes_object} AND c.zoid IS NULL;
DELETE s FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid < g.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes = {goes_older};
DELETE r FROM {relstore_garbage} g STRAIGHT_JOIN {relstore_refs} r ON r.zoid = g.zoid AND r.tid < g.tid + g.goes - 1
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes > {goes_later};
COMMIT

-- name: sweep (pack_id, oid, upto_oid) [hf]
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
SELECT count(*), CAST(coalesce(sum(s.state_size), 0) AS SIGNED), count(r.zoid), CAST(coalesce(sum(r.size), 0) AS SIGNED)
FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid
    LEFT JOIN {relstore_blob} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes = {goes_object};
DELETE s FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes = {goes_object};
DELETE r FROM {relstore_garbage} g STRAIGHT_JOIN {relstore_refs} r ON r.zoid = g.zoid AND r.tid = g.tid
WHERE g.pack_id = $pack_id AND g.zoid > $oid AND g.zoid <= $upto_oid AND g.goes = {goes_object};
COMMIT

-- Not EXISTS: MariaDB would make a list of all prev_tids there are, for each step. The newest row is left alone: finish
-- reads it with a lock, to choose the next tid, and would have to wait.
-- name: forget_transactions (tid, upto_tid, named) [hp]
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
SET @relstore_last = (SELECT max(tid) FROM {transaction});
UPDATE {object_state} s LEFT JOIN {object_state} r ON r.zoid = s.zoid AND r.tid = s.prev_tid SET s.prev_tid = 0
WHERE $named AND s.prev_tid > $tid AND s.prev_tid <= $upto_tid AND r.zoid IS NULL;
DELETE t FROM {transaction} t LEFT JOIN {object_state} s ON s.tid = t.tid
WHERE t.tid > $tid AND t.tid <= $upto_tid AND t.tid > 0 AND t.tid < @relstore_last AND s.tid IS NULL
    AND NOT ($named AND (SELECT n.tid FROM {object_state} n WHERE n.prev_tid = t.tid LIMIT 1) IS NOT NULL);
SET @relstore_count = ROW_COUNT();
UPDATE {transaction} SET packed = TRUE
WHERE tid > $tid AND tid <= $upto_tid AND tid > 0 AND tid < @relstore_last AND packed = FALSE;
SELECT @relstore_count;
COMMIT

-- name: has_foreign_key [hp]
SELECT count(*) FROM information_schema.key_column_usage
WHERE table_schema = DATABASE() AND table_name = 'object_state' AND referenced_table_name IS NOT NULL

-- Administration -----------------------------------------------------------------------------------------------

-- In the order of the oids, whatever the statistics say.
-- name: current_records (oid, limit) [hp]
SELECT s.zoid, s.tid, s.state
FROM {current_object} c FORCE INDEX (PRIMARY) STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE c.zoid >= $oid AND s.zoid >= $oid AND s.state IS NOT NULL ORDER BY c.zoid LIMIT $limit

-- It is always there.
-- name: index_for_relstorage [hp]
DO 0

-- name: size
{fresh}
SELECT CAST(coalesce(sum(data_length + index_length), 0) AS SIGNED) FROM information_schema.tables
WHERE table_schema = DATABASE()

-- name: estimated_count [hp]
{fresh}
SELECT table_rows FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'current_object'

-- name: estimated_count [hf]
{fresh}
SELECT table_rows FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'object_state'

-- name: restart_oids
TRUNCATE TABLE {new_oid}

-- TRUNCATE would commit, and refuses tables that others refer to.
-- name: zap [hp]
SET SESSION innodb_lock_wait_timeout = 30, lock_wait_timeout = 30;
START TRANSACTION;
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
COMMIT

-- name: zap [hf]
SET SESSION innodb_lock_wait_timeout = 30, lock_wait_timeout = 30;
START TRANSACTION;
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
COMMIT

-- So that it is not replaced meanwhile.
-- name: lock_revision (oid, tid) [hf]
SELECT zoid FROM {object_state} WHERE zoid = $oid AND tid = $tid FOR UPDATE
