-- What MariaDB says otherwise than MySQL.

-- name: lock_read
SELECT 'shared', zoid, tid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ? ORDER BY zoid
LOCK IN SHARE MODE SKIP LOCKED;
SELECT 'read', zoid, tid FROM {current} FORCE INDEX (PRIMARY) WHERE zoid IN ?
