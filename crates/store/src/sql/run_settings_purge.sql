-- Deletes settings that no run can refer to, at most $1: those whose last day is before every partition of ended runs,
-- except those of the runs that have no partition. Deletes none if there are $2 such runs.
WITH bound AS MATERIALIZED (
    -- run_insert.sql relies on settings of today and yesterday.
    SELECT least((now() AT TIME ZONE 'UTC')::date - 2,
                 min(to_date(right(c.relname, 8), 'YYYYMMDD'))) AS day
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'ended_runs'::regclass AND c.relname <> 'ended_runs_default'
),
stray AS MATERIALIZED (
    (SELECT settings_hash FROM live_runs
     WHERE id < run_id_at((SELECT day FROM bound)::timestamp AT TIME ZONE 'UTC') LIMIT $2)
    UNION ALL
    (SELECT settings_hash FROM ended_runs_default LIMIT $2)
)
DELETE FROM run_settings WHERE hash = ANY (ARRAY(
    SELECT hash FROM run_settings
    WHERE used_day < (SELECT day FROM bound)
      AND NOT hash = ANY (ARRAY(SELECT settings_hash FROM stray WHERE settings_hash IS NOT NULL))
      AND (SELECT count(*) FROM stray) < $2
    ORDER BY used_day LIMIT $1))
  -- Another transaction may have set a later day meanwhile.
  AND used_day < (SELECT day FROM bound)
