-- What SQLite's schema has besides, or otherwise.

-- Without the index on tid: to keep it in order took up to two fifths of a commit. Polls use that of object_state.
-- name: current_object [hp]
CREATE TABLE {current_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL
);

-- Oids are counted in the main file, so that one file is a whole backup. The value is the last one given out.
-- name: relstore_oid
CREATE TABLE {relstore_oid} (one INTEGER NOT NULL PRIMARY KEY CHECK (one = 1), value INTEGER NOT NULL);
INSERT INTO {relstore_oid} (one, value) VALUES (1, 0);
