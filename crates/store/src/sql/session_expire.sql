-- Ends open sessions that are past their expiry or idle time and have no unfinished run.
WITH due AS (
    SELECT s.id, s.expires_at <= now() AS expired
    FROM sessions s
    WHERE s.state = 'open'
      AND (s.expires_at <= now()
           OR (s.idle_ttl IS NOT NULL
               AND greatest(s.created_at, s.used_at, (SELECT max(r.ended_at) FROM runs r WHERE r.session_id = s.id))
                   + s.idle_ttl <= now()))
      AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.id AND r.state <> 'ended')
    LIMIT $1 FOR UPDATE OF s SKIP LOCKED
)
UPDATE sessions s SET
    state = 'ended', ended_at = now(),
    end_reason = CASE WHEN due.expired THEN 'expired' ELSE 'idle' END,
    removed_at = CASE WHEN home_root IS NULL THEN now() END
FROM due WHERE s.id = due.id
