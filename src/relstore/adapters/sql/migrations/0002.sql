-- A pack has a number of its own, which was called its generation; and a deletion by a collector outside has a column
-- of its own: it shared one with the number of the sweep, which took its place.

-- Who made the tables before there were packs may be running: it looks at no sweep, as RelStorage.
-- name: relstore_sweep
INSERT INTO {relstore_meta} (name, value) VALUES ('writers', 'any') ON CONFLICT (name) DO UPDATE SET value = 'any';

-- name: relstore_pack.pack_id
ALTER TABLE {relstore_pack} RENAME COLUMN generation TO pack_id;

-- name: relstore_garbage.pack_id
ALTER TABLE {relstore_garbage} RENAME COLUMN generation TO pack_id;

-- name: relstore_sweep.sweeping
ALTER TABLE {relstore_sweep} RENAME COLUMN generation TO sweeping;

-- name: relstore_sweep.deleted
ALTER TABLE {relstore_sweep} ADD COLUMN deleted {id} DEFAULT 0 NOT NULL;

-- name: (relstore_sweep)
UPDATE {relstore_sweep} SET deleted = -sweeping, sweeping = 0 WHERE sweeping < 0;
