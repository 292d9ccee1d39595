-- Whether a command may have been started in the session $1, or a file call made.
SELECT s.used_at IS NOT NULL
    OR (SELECT r.id FROM live_runs r WHERE r.session_id = s.id AND r.attempt > 1 LIMIT 1) IS NOT NULL
    OR (SELECT r.id FROM ended_runs r
        WHERE (r.session_id, r.id) >= (s.id, id_at(s.checked_at - interval '5 minutes'))
          AND (r.session_id, r.id) <= (s.id, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
          AND (r.started_at IS NOT NULL OR r.attempt > 1 OR r.result #>> '{outcome,kind}' = 'lost') LIMIT 1) IS NOT NULL
    OR (SELECT r.id FROM ended_runs r
        WHERE r.id = ANY (s.live_runs)
          AND (r.started_at IS NOT NULL OR r.attempt > 1 OR r.result #>> '{outcome,kind}' = 'lost') LIMIT 1) IS NOT NULL
    AS "found!"
FROM sessions s WHERE s.id = $1
