-- What SQLite's schema has besides.

-- Oids are counted in the main file, so that one file is a whole backup. The value is the last one given out.
-- name: relstore_oid
CREATE TABLE {relstore_oid} (one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT INTO {relstore_oid} (one, value) VALUES (1, 0);
