-- The partitions of ended runs, their output and their labels: one of each for each day.

-- Makes the partitions of a day, named after it: ended_runs_20300131, run_output_20300131 and
-- run_labels_20300131. Repeating it changes nothing. Rows of that day in the default partitions move to the
-- new ones. It locks one table after another, and a read of output may lock them in another order: it gives
-- up before Postgres ends one of both after a second. Call it again then.
CREATE FUNCTION create_run_partitions(day date) RETURNS void LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
DECLARE
    lower uuid := run_id_at(day::timestamp AT TIME ZONE 'UTC');
    upper uuid := run_id_at((day + 1)::timestamp AT TIME ZONE 'UTC');
    parent text;
    part text;
    key text;
BEGIN
    FOREACH parent IN ARRAY ARRAY['ended_runs', 'run_output', 'run_labels'] LOOP
        part := parent || to_char(day, '_YYYYMMDD');
        key := CASE parent WHEN 'ended_runs' THEN 'id' ELSE 'run_id' END;
        CONTINUE WHEN to_regclass(part) IS NOT NULL;
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)', part, parent);
        -- Nothing is inserted into the default partition from here on.
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', parent || '_default');
        EXECUTE format('WITH moved AS (DELETE FROM %I WHERE %I >= %L AND %I < %L RETURNING *) INSERT INTO %I SELECT * FROM moved',
                       parent || '_default', key, lower, key, upper, part);
        EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', parent, part, lower, upper);
    END LOOP;
END $$;

-- Upkeep makes those of later days.
SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date + days) FROM generate_series(0, 2) AS days;

-- Drops one partition of a day, and returns whether there was one. Fails if it does not get the lock soon:
-- whoever reads or ends runs waits behind it.
CREATE FUNCTION drop_run_partition(parent text, day date) RETURNS boolean
LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
DECLARE
    part text := parent || to_char(day, '_YYYYMMDD');
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
