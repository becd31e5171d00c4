-- What MySQL and MariaDB say otherwise.
--   `?` after IN is a list of values in parentheses. Where statements have several rows of VALUES, the row is repeated.

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
-- name: lock_schema
SELECT GET_LOCK(CONCAT('relstore.', LEFT(DATABASE(), 50)), ?)

-- name: unlock_schema
SET SESSION lock_wait_timeout = DEFAULT, innodb_lock_wait_timeout = DEFAULT;
DO RELEASE_LOCK(CONCAT('relstore.', LEFT(DATABASE(), 50)))

-- Behind a statement that waits to change a table all others wait who use it.
-- name: be_impatient
SET SESSION lock_wait_timeout = 1, innodb_lock_wait_timeout = 1

-- Who uses a table? Not everybody may see this, nor that.
-- name: table_holders
SELECT DISTINCT t.processlist_id, t.processlist_user, t.processlist_host,
    CAST(e.timer_wait DIV 1000000000000 AS SIGNED) AS seconds
FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.thread_id = m.owner_thread_id
    LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = m.owner_thread_id AND e.state = 'ACTIVE'
WHERE m.object_schema = DATABASE() AND m.object_name = ? AND m.lock_status = 'GRANTED'
    AND t.processlist_id <> CONNECTION_ID()
ORDER BY seconds DESC LIMIT 3

-- name: open_transactions
SELECT p.id, p.user, p.host, TIMESTAMPDIFF(SECOND, t.trx_started, NOW())
FROM information_schema.innodb_trx t JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()
ORDER BY t.trx_started LIMIT 3

-- name: new_epoch
INSERT IGNORE INTO {relstore_epoch} (one, value) VALUES (1, ?)

-- name: forget_epoch
DELETE FROM {relstore_epoch}

-- name: add_meta
INSERT IGNORE INTO {relstore_meta} (name, value) VALUES (?, ?)

-- name: set_meta
INSERT INTO {relstore_meta} (name, value) VALUES (?, ?) ON DUPLICATE KEY UPDATE value = VALUES(value)

-- Locked until they are deleted: a session that has been idle for a day may vote at any time.
-- name: old_commits
START TRANSACTION;
SELECT session FROM {relstore_commit} WHERE voted < UTC_TIMESTAMP() - INTERVAL 1 DAY AND session <> 0
LIMIT 1000 FOR UPDATE SKIP LOCKED

-- By the primary key: where most rows are to go, MariaDB would read the whole table, and wait for those that others lock.
-- name: forget_commits
DELETE c FROM {oids} o STRAIGHT_JOIN {relstore_commit} c FORCE INDEX (PRIMARY) ON c.session = o.zoid;
COMMIT

-- When the table was made: a restored one is another.
-- name: made
SELECT CAST(UNIX_TIMESTAMP(create_time) AS CHAR) FROM information_schema.tables
WHERE table_schema = DATABASE() AND table_name = 'relstore_epoch'

-- Reading ------------------------------------------------------------------------------------------------------

-- The order makes the index on tid the plan, whatever the statistics say.
-- name: poll [hp]
SELECT ({epoch}), (SELECT coalesce(max(t.tid), 0) FROM {transaction} t), o.number,
    (SELECT coalesce(max(t.tid), 0) FROM {transaction} t WHERE t.tid <= ?), c.zoid, c.tid
FROM {relstore_sweep} o LEFT JOIN
    (SELECT zoid, tid FROM {current_object} WHERE tid > ? ORDER BY tid LIMIT ?) c ON o.one = 1

-- name: poll [hf]
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY;
SELECT ({epoch}), (SELECT coalesce(max(t.tid), 0) FROM {object_state} t), o.number,
    (SELECT coalesce(max(t.tid), 0) FROM {object_state} t WHERE t.tid <= ?), c.zoid, c.tid
FROM {relstore_sweep} o LEFT JOIN
    (SELECT zoid, tid FROM {object_state} WHERE tid > ? ORDER BY tid LIMIT ?) c ON o.one = 1

-- Without a tid and a state for those that have changed since.
-- name: load_many [hp]
SELECT c.zoid, s.state, s.tid, s.refs FROM {oids} o STRAIGHT_JOIN {current_object} c ON c.zoid = o.zoid
    LEFT JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid AND s.tid <= ?
WHERE s.tid IS NULL OR s.state_size <= ? OR s.zoid = ?

-- name: load_older [hp]
SELECT zoid, state, tid, refs FROM
    (SELECT zoid, state, tid, refs, state_size FROM {object_state} WHERE zoid = ? AND tid <= ?
     ORDER BY tid DESC LIMIT 1) s
WHERE state_size <= ? OR zoid = ?

-- name: load_many [hf]
SELECT s.zoid, s.state, s.tid, CASE WHEN s.refs_tid = s.tid THEN s.refs END
FROM {oids} o STRAIGHT_JOIN {object_state} s ON s.zoid = o.zoid
WHERE s.tid <= ? AND (s.state_size <= ? OR s.zoid = ?)

-- MySQL 9.7 without statistics walks the index on tid from its end, unless it is told not to.
-- name: undo [hp]
SELECT u.zoid, u.md5, c.tid, s.md5, u.prev_tid,
       (SELECT p.tid FROM {object_state} p FORCE INDEX (PRIMARY) WHERE p.zoid = u.zoid AND p.tid < u.tid
        ORDER BY p.tid DESC LIMIT 1)
FROM {object_state} u STRAIGHT_JOIN {current_object} c ON c.zoid = u.zoid
     STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE u.tid = ? ORDER BY u.zoid

-- name: with_blobs
SELECT b.zoid FROM {oids} o STRAIGHT_JOIN {blob_chunk} b ON b.zoid = o.zoid LIMIT 1

-- Committing: one message for vote, one for finish. -------------------------------------------------------------

-- Locks by primary key in READ COMMITTED lock rows and no gaps, so new objects never wait for their neighbours. A
-- locking read sees what is committed now, also after it has waited. The row in relstore_commit stays locked until the
-- outcome is decided.
-- name: begin_vote
SET SESSION innodb_lock_wait_timeout = ?, lock_wait_timeout = ?, @relstore_outdated = 0;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES (?, ?, 0, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE vote = VALUES(vote), tid = 0, voted = VALUES(voted)

-- Is one of few objects not as it was read, for certain? What follows waits for no object then, and what was read is
-- looked at again with its locks. As a query: where SET has a subquery, rows may be locked.
-- name: look_at_reads
SELECT count(*) <> ? INTO @relstore_outdated FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ? AND tid IN ?

-- What is not there cannot be locked, so a row for each stands for objects that others may be creating. A row that
-- was deleted is locked as long as one that is there, and need not be removed by anyone. By a join: a DELETE with IN
-- waits for its neighbours' rows as well (MariaDB 10.11, MySQL 9.7; see test_mysql, NobodyWaits).
-- name: lock_created
SET @relstore_began = SYSDATE(6);
INSERT INTO {relstore_lock} (zoid) VALUES (?) ON DUPLICATE KEY UPDATE zoid = VALUES(zoid);
DELETE l FROM {oids} o STRAIGHT_JOIN {relstore_lock} l ON l.zoid = o.zoid;
SELECT 'created', 0, 0, TIMESTAMPDIFF(MICROSECOND, @relstore_began, SYSDATE(6))

-- Rows come as they are locked, so each tells when it was: NOW() is the time of the statement, SYSDATE() that of the row.
-- name: lock_current
SELECT 'current', zoid, tid, TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6))
FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ? AND coalesce(@relstore_outdated, 0) = 0 ORDER BY zoid FOR UPDATE

-- Shared locks come last and never wait: waiting for one while holding others deadlocks. By the primary key, because
-- a row that is locked there may not be skipped by another index.
-- name: lock_read
SELECT 'shared', zoid, tid, 0 FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ? ORDER BY zoid FOR SHARE SKIP LOCKED;
SELECT 'read', zoid, tid, 0 FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ?

-- Who had the lock that was not free in time? Asked when the transaction is over.
-- name: lock_free
SELECT 'free', zoid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ? ORDER BY zoid FOR UPDATE SKIP LOCKED;
SELECT 'there', zoid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ?

-- Not everybody may see this.
-- name: lock_holders
SELECT t.processlist_id, t.processlist_user, t.processlist_host, CAST(e.timer_wait DIV 1000000000000 AS SIGNED)
FROM performance_schema.data_locks l JOIN performance_schema.threads t ON t.thread_id = l.thread_id
    LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = l.thread_id AND e.state = 'ACTIVE'
WHERE l.object_schema = DATABASE() AND l.object_name = '{current}' AND l.index_name = 'PRIMARY'
    AND l.lock_data = ? AND l.lock_status = 'GRANTED' AND t.processlist_id <> CONNECTION_ID()
ORDER BY e.timer_wait DESC LIMIT 1

-- Who has the row that a connection waits for in this moment; those who wait themselves come last. A prepared
-- transaction has no connection. Not everybody may see this.
-- name: blockers
SELECT h.processlist_id, h.processlist_user, h.processlist_host,
    CAST(max(e.timer_wait) DIV 1000000000000 AS SIGNED) AS seconds
FROM performance_schema.threads t JOIN performance_schema.data_lock_waits w ON w.requesting_thread_id = t.thread_id
    JOIN performance_schema.data_locks l ON l.engine_lock_id = w.blocking_engine_lock_id
    LEFT JOIN performance_schema.threads h ON h.thread_id = w.blocking_thread_id
    LEFT JOIN performance_schema.events_transactions_current e ON e.thread_id = h.thread_id AND e.state = 'ACTIVE'
WHERE t.processlist_id = ?
GROUP BY h.processlist_id, h.processlist_user, h.processlist_host
ORDER BY min(l.lock_status), seconds DESC LIMIT 3

-- What a connection has waited for, for a second; an empty text for the commit lock: to take that takes no time else.
-- name: waits_for
SELECT CASE WHEN state LIKE 'Waiting for %' THEN state ELSE '' END FROM information_schema.processlist
WHERE id = ? AND time >= 1 AND (state LIKE 'Waiting for %' OR info LIKE '%FROM {commit_row_lock} FOR UPDATE')

-- A vote writes tid 0, and finish the tid.
-- name: unfinished
SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
SELECT count(*), TIMESTAMPDIFF(SECOND, min(voted), UTC_TIMESTAMP(6)) FROM {relstore_commit}
WHERE tid = 0 AND vote <> 0 AND session <> ?

-- name: lock_commit
SELECT 'commit', tid, 0, TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) FROM {commit_row_lock} FOR UPDATE

-- Shared until the commit: whoever begins a sweep waits for those that have voted.
-- name: lock_sweep
SELECT 'sweep', number, generation, 0 FROM {relstore_sweep} LOCK IN SHARE MODE

-- Deletions keep all other commits out: see Transaction.
-- name: lock_sweep_alone
SELECT 'sweep', number, generation, 0 FROM {relstore_sweep} FOR UPDATE

-- The last is whether what the transaction stands on is gone, see proof.py.
-- name: voted [hp]
SELECT ({epoch}), (SELECT coalesce(max(tid), 0) FROM {transaction}), CONNECTION_ID(),
    ? > (SELECT packed_to FROM {relstore_sweep}) AND NOT EXISTS (SELECT 1 FROM {transaction} t WHERE t.tid = ?)

-- name: voted [hf]
SELECT ({epoch}), (SELECT coalesce(max(tid), 0) FROM {object_state}), CONNECTION_ID(),
    EXISTS (SELECT 1 FROM {revisions} k STRAIGHT_JOIN {object_state} c ON c.zoid = k.zoid WHERE c.tid < k.tid)

-- name: current_states [hp]
SELECT c.zoid, c.tid, s.state FROM {current_object} c STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE c.zoid IN ?

-- name: current_states [hf]
SELECT zoid, tid, state FROM {object_state} WHERE zoid IN ?

-- Neither of these commits, unlike those for tables that are not temporary.
-- name: begin_stage
DROP TEMPORARY TABLE IF EXISTS relstore_stage;
CREATE TEMPORARY TABLE relstore_stage (zoid {id} NOT NULL PRIMARY KEY, prev_tid {id}, md5 {md5}, state_size {id},
    state {bytes}, refs {bytes}, data_tid {id}) ENGINE=InnoDB

-- name: stage
INSERT INTO relstore_stage (zoid, prev_tid, md5, state_size, state, refs, data_tid) VALUES (?, ?, ?, ?, ?, ?, ?)

-- In a cluster a lock is that of one server, but no two can write one row at once. So there all commits write one
-- (in_order) before the tid is chosen: else one could become visible after another with a larger tid, and readers, who
-- ask for what came after the newest they know, would never learn of it; see test_galera.
-- ZODB's timestamp: minutes since 1900, counting 31 days to a month, then the fraction of the minute in 1/2^32. There
-- is no tid where the transaction that has voted is gone, so that nothing can be written.
-- name: begin_finish
SET SESSION innodb_lock_wait_timeout = ?, lock_wait_timeout = ?;
SELECT TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) INTO @relstore_waited FROM {commit_row_lock} FOR UPDATE;
{in_order}
SET @relstore_now = UTC_TIMESTAMP(6);
SET @relstore_tid = coalesce(?, greatest(
    CAST((SELECT coalesce(max(tid), 0) FROM {last}) AS SIGNED) + 1,
    CAST(((((YEAR(@relstore_now) - 1900) * 12 + MONTH(@relstore_now) - 1) * 31 + DAY(@relstore_now) - 1) * 24
          + HOUR(@relstore_now)) * 60 + MINUTE(@relstore_now) AS SIGNED) * 4294967296
    + CAST(SECOND(@relstore_now) * 1000000 + MICROSECOND(@relstore_now) AS SIGNED) * 4294967296 DIV 60000000));
SET @relstore_tid = IF(EXISTS(SELECT 1 FROM {relstore_commit} WHERE session = ? AND vote = ?), @relstore_tid, NULL)

-- name: insert_transaction [hp]
INSERT INTO {transaction} (tid, packed, username, description, extension) VALUES (@relstore_tid, ?, ?, ?, ?)

-- name: insert_states [hp]
INSERT INTO {object_state} (zoid, tid, prev_tid, md5, state_size, state, refs, data_tid)
VALUES (?, @relstore_tid, ?, ?, ?, ?, ?, ?)

-- name: point_current [hp]
INSERT INTO {current_object} (zoid, tid) VALUES (?, @relstore_tid) ON DUPLICATE KEY UPDATE tid = VALUES(tid)

-- name: insert_states [hf]
INSERT INTO {object_state} (zoid, tid, state_size, state, refs, refs_tid)
VALUES (?, @relstore_tid, ?, ?, ?, @relstore_tid)
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

-- The tid is returned before the COMMIT, but counts only where the whole message was answered.
-- name: end_finish
UPDATE {relstore_commit} SET tid = @relstore_tid WHERE session = ? AND vote = ?;
SELECT @relstore_tid, @relstore_waited;
COMMIT

-- Waits until the transaction is decided. The commit of our own is for what was asked about: it must be on disk too. In a
-- cluster, where it may be open on another server still, it cannot be committed after the row was written here.
-- name: outcome
SET SESSION innodb_lock_wait_timeout = ?;
START TRANSACTION;
SELECT tid FROM {relstore_commit} WHERE session = ? AND vote = ? FOR UPDATE;
INSERT INTO {relstore_commit} (session, vote, tid, voted) VALUES (?, 0, 0, UTC_TIMESTAMP(6))
ON DUPLICATE KEY UPDATE voted = VALUES(voted);
COMMIT

-- name: kill
KILL ?

-- Rows are removed by whoever has made them: nobody waits for others, and the counter stays.
-- name: new_oids
START TRANSACTION;
INSERT INTO {new_oid} (zoid) VALUES (NULL);
SET @relstore_first = LAST_INSERT_ID();
SELECT @relstore_first, @@auto_increment_increment;
DELETE FROM {new_oid} WHERE zoid >= @relstore_first AND zoid < @relstore_first + ? * @@auto_increment_increment;
COMMIT

-- name: reserve_oids
INSERT IGNORE INTO {new_oid} (zoid) VALUES (?);
DELETE FROM {new_oid} WHERE zoid = ?

-- Within a transaction: the counter stays ahead, while nobody has to wait for the row until the commit.
-- name: reserve_oids_at_once
SAVEPOINT relstore_oids;
INSERT IGNORE INTO {new_oid} (zoid) VALUES (?);
ROLLBACK TO SAVEPOINT relstore_oids

-- Packing ------------------------------------------------------------------------------------------------------

-- Nothing ends it but its end.
-- name: begin_snapshot
SET SESSION wait_timeout = 31536000, max_execution_time = 0;
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY

-- No index serves a comparison of rows; MariaDB knows this alternative to one only as it is written here.
-- name: revisions [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE s.zoid > ? OR s.zoid = ? AND s.tid > ? ORDER BY s.zoid, s.tid LIMIT ?

-- name: revisions_only [hp]
SELECT zoid, tid, NULL, NULL, state IS NULL FROM {object_state}
WHERE zoid > ? OR zoid = ? AND tid > ? ORDER BY zoid, tid LIMIT ?

-- From an index alone, else MySQL 9.7 without statistics reads and sorts the whole table.
-- name: changes [hp]
SELECT s.zoid, s.tid, coalesce(s.refs, r.refs),
       CASE WHEN s.refs IS NULL AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END, s.state IS NULL
FROM (SELECT zoid, tid FROM {object_state} WHERE tid > ? OR tid = ? AND zoid > ? ORDER BY tid, zoid LIMIT ?) c
    STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
    LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
ORDER BY s.tid, s.zoid

-- name: changes [hf]
SELECT s.zoid, s.tid, coalesce(CASE WHEN s.refs_tid = s.tid THEN s.refs END, r.refs),
       CASE WHEN (s.refs IS NULL OR s.refs_tid <> s.tid) AND r.refs IS NULL AND s.state_size <= 20000 THEN s.state END,
       s.state IS NULL
FROM (SELECT zoid, tid FROM {object_state} WHERE tid > ? OR tid = ? AND zoid > ? ORDER BY tid, zoid LIMIT ?) c
    STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
    LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
ORDER BY s.tid, s.zoid

-- name: save_references [hp]
INSERT IGNORE INTO {relstore_refs} (zoid, tid, refs) VALUES (?, ?, ?)

-- name: save_references [hf]
INSERT INTO {relstore_refs} (zoid, tid, refs) VALUES (?, ?, ?)
ON DUPLICATE KEY UPDATE tid = VALUES(tid), refs = VALUES(refs)

-- RelStorage's tids of transactions are unsigned, and so is what is subtracted from them.
-- name: tell_deletion [hp]
UPDATE {relstore_sweep} SET generation = -1 - CAST((SELECT max(tid) FROM {transaction}) AS SIGNED) WHERE generation <= 0

-- name: pack_swept
UPDATE {relstore_pack} p, {relstore_sweep} s SET p.progress = 'swept', p.number = s.number,
    p.objects = (SELECT count(*) FROM {relstore_garbage} g WHERE g.generation = ? AND g.goes = 2) WHERE p.generation = ?

-- name: take_marks [hf]
INSERT IGNORE INTO {relstore_garbage} (generation, zoid, tid, since, goes)
SELECT -p.generation, o.zoid, 0, 0, -1 FROM {oids} o STRAIGHT_JOIN {relstore_pack} p WHERE p.generation = ?

-- name: spare
UPDATE {oids} o STRAIGHT_JOIN {relstore_garbage} g ON g.zoid = o.zoid SET g.goes = -1 WHERE g.generation = ?

-- name: forget_garbage
DELETE FROM {relstore_garbage} WHERE abs(generation) NOT IN (?, ?)
    AND abs(generation) NOT IN (SELECT generation FROM {relstore_sweep}) LIMIT 10000

-- name: unknown_references [hp]
SELECT s.zoid, s.tid, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.zoid > ? OR s.zoid = ? AND s.tid > ?) AND s.zoid <= ? AND s.state IS NOT NULL AND s.refs IS NULL AND r.refs IS NULL
ORDER BY s.zoid, s.tid LIMIT ?

-- name: known_references [hp]
SELECT s.zoid, s.tid, s.refs, r.refs, CASE WHEN s.state_size <= 20000 THEN s.state END
FROM {object_state} s LEFT JOIN {relstore_refs} r ON r.zoid = s.zoid AND r.tid = s.tid
WHERE (s.zoid > ? OR s.zoid = ? AND s.tid > ?) AND s.zoid <= ? AND s.state IS NOT NULL ORDER BY s.zoid, s.tid LIMIT ?

-- name: garbage_sizes [hp]
SELECT n.zoid, z.states, z.bytes, n.tid, CASE WHEN n.state_size <= 20000 THEN n.state END
FROM (SELECT s.zoid, count(*) AS states, CAST(sum(s.state_size) AS SIGNED) AS bytes, max(s.tid) AS tid
      FROM {revisions} r STRAIGHT_JOIN {object_state} s ON s.zoid = r.zoid AND s.tid <= r.tid GROUP BY s.zoid) z
     STRAIGHT_JOIN {object_state} n ON n.zoid = z.zoid AND n.tid = z.tid

-- name: garbage_sizes [hf]
SELECT n.zoid, 1, n.state_size, n.tid, CASE WHEN n.state_size <= 20000 THEN n.state END
FROM {revisions} r STRAIGHT_JOIN {object_state} n ON n.zoid = r.zoid AND n.tid = r.tid

-- A lock of the session, which is RelStorage's too. One that was closed just now may have it for a moment more.
-- name: lock_pack
SELECT GET_LOCK(CONCAT(DATABASE(), '.pack'), 1)

-- name: pack_holder
SELECT p.id, CONCAT(p.user, '@', p.host) FROM information_schema.processlist p
WHERE p.id = IS_USED_LOCK(CONCAT(DATABASE(), '.pack'))

-- A session that has the lock may be idle.
-- name: stay
SET SESSION wait_timeout = 31536000

-- name: lock_votes
SET SESSION innodb_lock_wait_timeout = ?;
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
-- name: sweep [hp]
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
DELETE c FROM {relstore_garbage} g STRAIGHT_JOIN {current_object} c ON c.zoid = g.zoid AND c.tid = g.tid
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes = 2;
SELECT count(*), CAST(coalesce(sum(s.state_size), 0) AS SIGNED)
FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid < g.tid + g.goes - 1
    LEFT JOIN {current_object} c ON c.zoid = g.zoid AND g.goes = 2
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes > 0 AND c.zoid IS NULL;
DELETE s FROM {relstore_garbage} g LEFT JOIN {current_object} c ON c.zoid = g.zoid
    STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid <= g.tid
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes = 2 AND c.zoid IS NULL;
DELETE s FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid < g.tid
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes = 1;
DELETE r FROM {relstore_garbage} g STRAIGHT_JOIN {relstore_refs} r ON r.zoid = g.zoid AND r.tid < g.tid + g.goes - 1
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes > 0;
COMMIT

-- name: sweep [hf]
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
SELECT count(*), CAST(coalesce(sum(s.state_size), 0) AS SIGNED)
FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes = 2;
DELETE s FROM {relstore_garbage} g STRAIGHT_JOIN {object_state} s ON s.zoid = g.zoid AND s.tid = g.tid
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes = 2;
DELETE r FROM {relstore_garbage} g STRAIGHT_JOIN {relstore_refs} r ON r.zoid = g.zoid AND r.tid = g.tid
WHERE g.generation = ? AND g.zoid > ? AND g.zoid <= ? AND g.goes = 2;
COMMIT

-- Not EXISTS: MariaDB would make a list of all prev_tids there are, for each step. The newest row is left alone: finish
-- reads it with a lock, to choose the next tid, and would have to wait.
-- name: forget_transactions [hp]
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
START TRANSACTION;
SET @relstore_last = (SELECT max(tid) FROM {transaction});
DELETE t FROM {transaction} t LEFT JOIN {object_state} s ON s.tid = t.tid
WHERE t.tid > ? AND t.tid <= ? AND t.tid > 0 AND t.tid < @relstore_last AND s.tid IS NULL
    AND NOT (? AND (SELECT n.tid FROM {object_state} n WHERE n.prev_tid = t.tid LIMIT 1) IS NOT NULL);
SET @relstore_count = ROW_COUNT();
UPDATE {transaction} SET packed = TRUE
WHERE tid > ? AND tid <= ? AND tid > 0 AND tid < @relstore_last AND packed = FALSE;
SELECT @relstore_count;
COMMIT

-- name: has_foreign_key [hp]
SELECT count(*) FROM information_schema.key_column_usage
WHERE table_schema = DATABASE() AND table_name = 'object_state' AND referenced_table_name IS NOT NULL

-- Administration -----------------------------------------------------------------------------------------------

-- name: current_records [hp]
SELECT s.zoid, s.tid, s.state
FROM {current_object} c FORCE INDEX (PRIMARY) STRAIGHT_JOIN {object_state} s ON s.zoid = c.zoid AND s.tid = c.tid
WHERE c.zoid >= ? AND s.zoid >= ? AND s.state IS NOT NULL ORDER BY c.zoid LIMIT ?

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
COMMIT

-- name: zap [hf]
SET SESSION innodb_lock_wait_timeout = 30, lock_wait_timeout = 30;
START TRANSACTION;
DELETE FROM {blob_chunk};
DELETE FROM {object_state};
DELETE FROM {object_ref};
DELETE FROM {object_refs_added};
DELETE FROM {pack_object};
DELETE FROM {relstore_refs};
DELETE FROM {relstore_garbage};
DELETE FROM {relstore_pack};
UPDATE {relstore_sweep} SET number = number + 1, generation = 0, packed_to = 0;
COMMIT
