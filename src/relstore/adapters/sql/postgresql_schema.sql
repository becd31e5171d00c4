-- What PostgreSQL's schema has besides, or otherwise.

-- Without the index on tid: then a new tid changes no index, if there is room for the row on its page, and to write it
-- takes less than half as long. Polls use that of object_state. Where all rows of a page change at once some have to go
-- to others, which leaves more room on both.
-- name: current_object [hp]
CREATE TABLE {current_object} (
    zoid        {id} NOT NULL PRIMARY KEY,
    tid         {id} NOT NULL
) WITH (fillfactor = 70);

-- Value n stands for the oids 16n-15 .. 16n.
-- name: zoid_seq
CREATE SEQUENCE {zoid_seq};

-- Where RelStorage undoes a transaction, the new revision of a blob shares its large object with an older one. The first
-- trigger of relstore's did not know that, and the second called whatever function the search path led to.
-- name: relstore_unlink_chunk_3
CREATE FUNCTION {relstore_unlink_chunk_3}() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {blob_chunk} b WHERE b.zoid = OLD.zoid AND b.chunk = OLD.chunk
                       AND (b.tid, b.chunk_num) <> (OLD.tid, OLD.chunk_num)) THEN
        PERFORM lo_unlink(OLD.chunk);
    END IF;
    RETURN OLD;
END $$;
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_trigger t
               WHERE t.tgrelid = '{blob_chunk}'::regclass::oid AND t.tgname = 'blob_chunk_delete'
                   AND t.tgfoid IN (pg_catalog.to_regprocedure('{relstore_unlink_chunk_1}()')::oid,
                                    pg_catalog.to_regprocedure('{relstore_unlink_chunk_2}()')::oid)) THEN
        DROP TRIGGER blob_chunk_delete ON {blob_chunk};
        CREATE TRIGGER blob_chunk_delete BEFORE DELETE ON {blob_chunk}
            FOR EACH ROW EXECUTE FUNCTION {relstore_unlink_chunk_3}();
        DROP FUNCTION IF EXISTS {relstore_unlink_chunk_1}(), {relstore_unlink_chunk_2}();
    END IF;
END $$;

-- name: blob_chunk_delete
CREATE TRIGGER blob_chunk_delete BEFORE DELETE ON {blob_chunk}
    FOR EACH ROW EXECUTE FUNCTION {relstore_unlink_chunk_3}();

-- One statement, so that there are both or none.
-- name: refs [hp]
ALTER TABLE {object_state} ADD COLUMN IF NOT EXISTS refs {bytes}, ADD COLUMN IF NOT EXISTS data_tid {id};

-- name: refs [hf]
ALTER TABLE {object_state} ADD COLUMN IF NOT EXISTS refs {bytes}, ADD COLUMN IF NOT EXISTS refs_tid {id};
