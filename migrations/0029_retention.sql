-- What: drops the runs of a day; how far the output of a tenant is deleted that keeps its runs for longer.
-- Why:  a day that nobody needs any more is removed at once; output may be deleted before the record of its run.
-- Lock: none; a new function and a new table.

-- Drops one partition of a day, or the one of all days before, and returns whether there was one. Fails if it does not
-- get the lock soon: whoever reads or ends runs waits behind it.
CREATE FUNCTION drop_run_partition(parent text, day date) RETURNS boolean LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
DECLARE
    part text := parent || CASE WHEN day < first_run_partition() THEN '_before' ELSE to_char(day, '_YYYYMMDD') END;
BEGIN
    IF parent NOT IN ('ended_runs', 'run_output', 'run_labels') OR day >= (now() AT TIME ZONE 'UTC')::date THEN
        RAISE 'not a partition of past runs: % %', parent, day;
    END IF;
    IF to_regclass(part) IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP TABLE %I', part);
    RETURN true;
END $$;

CREATE TABLE output_purges (
    tenant_id text PRIMARY KEY REFERENCES tenants (id) ON DELETE CASCADE,
    -- The output of runs up to this id is deleted,
    done      uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    -- except that of these, which had not ended for long enough.
    late      uuid[] NOT NULL DEFAULT '{}'
);
