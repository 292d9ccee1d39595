-- What: rows of run_output may name an object outside the database instead of holding bytes; which store has the
--       objects; objects that no row names any more.
-- Why:  large output need not pass through the write-ahead log and the tables (docs/adr/0013-output-objects.md).
-- Lock: ACCESS EXCLUSIVE on run_output and its partitions for a moment. Nothing is read or rewritten: new columns are
--       null, and the new constraint is not checked for old rows, which all satisfy it.

ALTER TABLE run_output
    ALTER data DROP NOT NULL,
    -- DAY/RUN_INCARNATION_POSITION_LENGTH, see store/src/objects/name.rs.
    ADD COLUMN object text,
    -- Where the bytes start in the object, and how many they are.
    ADD COLUMN object_offset integer,
    ADD COLUMN length integer,
    ADD CONSTRAINT run_output_object_check CHECK (
        CASE WHEN data IS NULL THEN coalesce(object_offset >= 0 AND length BETWEEN 1 AND 1048576
                                             -- Only objects of its own run.
                                             AND left(split_part(object, '/', 2), 37) = run_id || '_', false)
             ELSE object IS NULL AND object_offset IS NULL AND length IS NULL END) NOT VALID;

-- The store of this database. Its id is in an object there, too.
CREATE TABLE output_store (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    id       uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Where it was when it was first used; null before.
    location text
);
INSERT INTO output_store DEFAULT VALUES;

-- Objects whose rows are deleted. A transaction that deletes rows inserts here; upkeep removes the objects, then these.
CREATE TABLE output_removals (
    object text PRIMARY KEY
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
