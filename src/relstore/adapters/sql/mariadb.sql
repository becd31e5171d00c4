-- What MariaDB says otherwise than MySQL.

-- name: lock_read
SELECT 'shared', zoid, tid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ? ORDER BY zoid
LOCK IN SHARE MODE SKIP LOCKED;
SELECT 'read', zoid, tid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ?

-- Where a node of Galera ends a transaction for one of another node, in the middle of a message, the statements after
-- it are run as if nothing had happened: outside of any transaction (10.11; see test_galera). So there finish is one
-- block, and begins with a look for what the vote has written.
-- name: check_vote
IF NOT EXISTS (SELECT 1 FROM {relstore_commit} WHERE session = ? AND vote = ?) THEN
    SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock: another node has changed an object';
END IF
