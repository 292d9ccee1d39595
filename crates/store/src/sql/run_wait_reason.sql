-- For each run, how many live workers could take it: all, with its session's mode, with the session's files as well,
-- with space for a new session, ready, with a free slot.
SELECT r.id AS "run!", r.session_id AS "session!", r.tenant_id AS "tenant!", s.spec ->> 'mode' AS "mode!", r.queue_timeout AS "queue_timeout?",
       found.live AS "live!", found.with_mode AS "with_mode!", found.with_files AS "with_files!", found.with_space AS "with_space!",
       found.ready AS "ready!", found.free AS "free!"
FROM live_runs r JOIN sessions s ON s.id = r.session_id
CROSS JOIN LATERAL (
    SELECT count(*) AS live,
           count(*) FILTER (WHERE w.has_mode) AS with_mode,
           count(*) FILTER (WHERE w.has_mode AND w.has_files) AS with_files,
           count(*) FILTER (WHERE w.has_mode AND w.has_files AND w.has_space) AS with_space,
           count(*) FILTER (WHERE w.has_mode AND w.has_files AND w.has_space AND w.ready) AS ready,
           count(*) FILTER (WHERE w.has_mode AND w.has_files AND w.has_space AND w.ready AND w.free) AS free
    FROM (
        SELECT s.spec ->> 'mode' = ANY (modes) AS has_mode,
               s.home_root IS NULL OR s.home_root = root_id
                   -- See lease_acquire.sql.
                   OR (s.allow_data_loss AND root_is_gone(s.home_root)) AS has_files,
               s.home_root IS NOT NULL OR NOT disk_is_short AS has_space,
               state = 'ready' AS ready, busy_slots < slots AS free
        FROM workers WHERE lease_until > now() AND state <> 'left'
    ) AS w
) AS found
WHERE r.id = ANY ($1)
