-- Decides about open sessions that are due ($1, locked by the caller): ends those that expired or were idle for too long
-- and have no unfinished run, and expired ones whose runs no worker can take any more, which end as $2. Looks at the
-- others again when they may be due.
WITH found AS MATERIALIZED (
    SELECT s.id, s.expires_at <= now() AS expired, s.idle_ttl,
           -- Ended runs are found by their ids, so those that run for longer than the time between two checks are
           -- remembered. With very many of them the next check starts where this one did.
           ARRAY(SELECT r.id FROM live_runs r WHERE r.session_id = s.id LIMIT 101) AS live,
           -- No worker holds it, none may take it, and none may have started a run.
           s.expires_at <= now()
               AND NOT EXISTS (SELECT 1 FROM workers w
                               WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation AND w.lease_until > now())
               AND (SELECT r.id FROM live_runs r
                    WHERE (r.session_id, r.state, r.id) > (s.id, 'running', '00000000-0000-0000-0000-000000000000')
                      AND (r.session_id, r.state, r.id) < (s.id, 'running', 'ffffffff-ffff-ffff-ffff-ffffffffffff')
                    LIMIT 1) IS NULL AS stranded,
           greatest(s.created_at, s.used_at, s.idle_since,
                    -- Before its first check it is not known when its runs ended.
                    CASE WHEN s.checked_at IS NULL THEN now() END,
                    (SELECT max(r.ended_at) FROM ended_runs r
                     -- The clocks that ids are made with may differ. By the index of sessions: see run/list.rs.
                     WHERE (r.session_id, r.id) >= (s.id, id_at(s.checked_at - interval '5 minutes'))
                       AND (r.session_id, r.id) <= (s.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff')),
                    (SELECT max(r.ended_at) FROM ended_runs r WHERE r.id = ANY (s.live_runs))) AS ended_use,
           -- Runs may be deleted before their session ends. That there were some tells that files may exist.
           coalesce(s.used_at,
                    (SELECT r.created_at FROM live_runs r WHERE r.session_id = s.id AND r.attempt > 1 LIMIT 1),
                    (SELECT r.ended_at FROM ended_runs r
                     WHERE (r.session_id, r.id) >= (s.id, id_at(s.checked_at - interval '5 minutes'))
                       AND (r.session_id, r.id) <= (s.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
                       AND (r.started_at IS NOT NULL OR r.attempt > 1 OR r.result #>> '{outcome,kind}' = 'lost')
                     LIMIT 1),
                    (SELECT r.ended_at FROM ended_runs r
                     WHERE r.id = ANY (s.live_runs)
                       AND (r.started_at IS NOT NULL OR r.attempt > 1 OR r.result #>> '{outcome,kind}' = 'lost')
                     LIMIT 1)) AS used_at
    FROM sessions s WHERE s.id = ANY ($1)
),
decided AS (
    SELECT id, expired, live, idle_ttl, used_at, last_use,
           stranded OR (live = '{}' AND (expired OR coalesce(last_use + idle_ttl <= now(), false))) AS ends
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
ending AS (
    INSERT INTO ending_sessions (session_id, outcome)
    SELECT id, $2 FROM decided WHERE ends AND live <> '{}' ON CONFLICT (session_id) DO NOTHING
),
not_waiting AS (
    DELETE FROM waiting_sessions w USING ended WHERE w.session_id = ended.id
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
