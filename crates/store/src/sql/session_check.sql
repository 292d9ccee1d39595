-- Decides about open sessions that are due ($1, locked by the caller): ends those that expired or were idle for too long
-- and have no unfinished run, and looks at the others again when they may be due.
WITH found AS (
    SELECT s.id, s.expires_at <= now() AS expired, s.idle_ttl,
           -- Ended runs are found by their ids, so those that run for longer than the time between two checks are
           -- remembered. With very many of them the next check starts where this one did.
           ARRAY(SELECT r.id FROM runs r WHERE r.session_id = s.id AND r.state <> 'ended' LIMIT 101) AS live,
           greatest(s.created_at, s.used_at, s.idle_since,
                    -- Of a session of an earlier version it is not known when its runs ended.
                    CASE WHEN s.checked_at IS NULL THEN now() END,
                    (SELECT max(r.ended_at) FROM runs r
                     -- The clocks that ids are made with may differ.
                     WHERE r.session_id = s.id AND r.id >= id_at(s.checked_at - interval '5 minutes')),
                    (SELECT max(r.ended_at) FROM runs r WHERE r.id = ANY (s.live_runs))) AS ended_use,
           -- Runs may be deleted before their session ends. That there were some tells that files may exist.
           coalesce(s.used_at,
                    (SELECT coalesce(r.ended_at, r.created_at) FROM runs r
                     WHERE r.session_id = s.id
                       AND (r.started_at IS NOT NULL OR r.attempt > 1 OR r.outcome ->> 'kind' = 'lost')
                     LIMIT 1)) AS used_at
    FROM sessions s WHERE s.id = ANY ($1)
),
decided AS (
    SELECT id, expired, live, idle_ttl, used_at, last_use,
           live = '{}' AND (expired OR coalesce(last_use + idle_ttl <= now(), false)) AS ends
    FROM (SELECT *, CASE WHEN live = '{}' THEN ended_use ELSE now() END AS last_use FROM found) AS used
),
ended AS (
    UPDATE sessions s SET
        state = 'ended', ended_at = now(),
        end_reason = CASE WHEN d.expired THEN 'expired' ELSE 'idle' END,
        -- A session that was never leased has no directory.
        removed_at = CASE WHEN s.home_root IS NULL THEN now() END
    FROM decided d WHERE s.id = d.id AND d.ends
    RETURNING s.id
),
postponed AS (
    UPDATE sessions s SET
        check_at = CASE WHEN d.expired THEN now() + interval '1 second'
                        ELSE least(s.expires_at, d.last_use + d.idle_ttl, now() + interval '15 minutes') END,
        idle_since = d.last_use,
        used_at = d.used_at,
        checked_at = CASE WHEN cardinality(d.live) <= 100 THEN now() ELSE s.checked_at END,
        live_runs = CASE WHEN cardinality(d.live) <= 100 THEN d.live ELSE s.live_runs END
    FROM decided d WHERE s.id = d.id AND NOT d.ends
)
SELECT count(*) AS "ended!" FROM ended
