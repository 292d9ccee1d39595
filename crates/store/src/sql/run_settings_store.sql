-- Stores settings $2 with their hash $1 for runs up to the day of run $3, or up to today if that is later, and returns
-- whether the stored ones are equal. Writes nothing if they are stored for that long. Returns no row if another
-- transaction has just stored them.
WITH day AS (
    SELECT greatest(run_day($3), (now() AT TIME ZONE 'UTC')::date) AS last
),
stored AS (
    INSERT INTO run_settings AS s (hash, settings, used_day) SELECT $1, $2, day.last FROM day
    ON CONFLICT (hash) DO UPDATE SET used_day = excluded.used_day WHERE s.used_day < excluded.used_day
    RETURNING s.settings
)
SELECT settings = $2 AS "is_same!" FROM stored
UNION ALL
SELECT s.settings = $2 FROM run_settings s, day
WHERE s.hash = $1 AND s.used_day >= day.last AND NOT EXISTS (SELECT 1 FROM stored)
