-- What PostgreSQL's schema has besides.

-- Value n stands for the oids 16n-15 .. 16n.
-- name: zoid_seq
CREATE SEQUENCE {zoid_seq};

-- name: blob_chunk_delete
CREATE FUNCTION {relstore_unlink_chunk_1}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM lo_unlink(OLD.chunk);
    RETURN OLD;
END $$;
CREATE TRIGGER blob_chunk_delete BEFORE DELETE ON {blob_chunk}
    FOR EACH ROW EXECUTE FUNCTION {relstore_unlink_chunk_1}();
