-- What an older relstore is to find no more: these read the columns that have other names now.

-- name: (relstore_vote_4)
DROP FUNCTION {relstore_vote_4};

-- name: (relstore_sweep_2)
DROP FUNCTION {relstore_sweep_2};

-- The epoch that it tells lacks the version of the tables.
-- name: (relstore_poll_3)
DROP FUNCTION {relstore_poll_3};
