-- What MariaDB says otherwise than MySQL.

-- macro: server_name
CONCAT_WS('.', @@hostname, @@port, @@server_id)

-- macro: fresh

-- macro: insert_ahead
SET STATEMENT foreign_key_checks = 0 FOR INSERT INTO

-- It has another word for FOR SHARE.
-- name: lock_read (in_oids)
SELECT 'shared', zoid, tid, 0 FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids ORDER BY zoid
LOCK IN SHARE MODE SKIP LOCKED;
SELECT 'read', zoid, tid, 0 FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN $in_oids

-- It does not show locks, only who has some.
-- name: lock_holders (oid)
SELECT p.id, p.user, p.host, TIMESTAMPDIFF(SECOND, t.trx_started, NOW())
FROM information_schema.innodb_trx t JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id
WHERE p.db = DATABASE() AND t.trx_rows_locked > 0 AND p.id <> CONNECTION_ID()
ORDER BY t.trx_started LIMIT 3

-- As InnoDB saw it a tenth of a second ago, or longer where others have asked since.
-- name: blockers (connection)
SELECT p.id, p.user, p.host, TIMESTAMPDIFF(SECOND, min(h.trx_started), NOW()) AS seconds
FROM information_schema.innodb_trx t
    JOIN information_schema.innodb_lock_waits w ON w.requesting_trx_id = t.trx_id
    JOIN information_schema.innodb_trx h ON h.trx_id = w.blocking_trx_id
    LEFT JOIN information_schema.processlist p ON p.id = h.trx_mysql_thread_id
WHERE t.trx_mysql_thread_id = $connection
GROUP BY p.id, p.user, p.host
ORDER BY min(h.trx_state = 'LOCK WAIT'), seconds DESC LIMIT 3

-- name: begin_snapshot
SET SESSION wait_timeout = 31536000, max_statement_time = 0, idle_transaction_timeout = 0,
    idle_readonly_transaction_timeout = 0;
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ;
START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY

-- name: table_holders (table)
SELECT DISTINCT p.id, p.user, p.host, TIMESTAMPDIFF(SECOND, t.trx_started, NOW()) AS seconds
FROM information_schema.metadata_lock_info m JOIN information_schema.processlist p ON p.id = m.thread_id
    LEFT JOIN information_schema.innodb_trx t ON t.trx_mysql_thread_id = p.id
WHERE m.table_schema = DATABASE() AND m.table_name = $table AND p.id <> CONNECTION_ID()
ORDER BY seconds DESC LIMIT 3

-- Where a node of Galera ends a transaction for one of another node, in the middle of a message, the statements after
-- it are run as if nothing had happened: outside of any transaction (10.11; see test_galera). So there finish is one
-- block, and begins with a look for what the vote has written.
-- name: check_vote (session, vote)
IF NOT EXISTS (SELECT 1 FROM {relstore_commit} WHERE session = $session AND vote = $vote) THEN
    SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock: another node has changed an object';
END IF
