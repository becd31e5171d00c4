-- There is no ON CONFLICT.
-- name: relstore_sweep
INSERT INTO {relstore_meta} (name, value) VALUES ('writers', 'any') ON DUPLICATE KEY UPDATE value = 'any';
