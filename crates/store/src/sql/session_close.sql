-- Closes a session and cancels its queued runs. The holder ends the running ones.
WITH found AS (
    SELECT id FROM sessions
    WHERE tenant_id = $1 AND (id = $2 OR (alias = $3 AND state = 'open'))
),
ended AS (
    UPDATE sessions s SET state = 'ended', end_reason = 'closed', ended_at = now(),
        -- A session that was never leased has no directory.
        removed_at = CASE WHEN home_root IS NULL THEN now() END
    FROM found WHERE s.id = found.id AND s.state = 'open'
    RETURNING s.id
),
canceled AS (
    UPDATE runs r SET state = 'ended', ended_at = now(), outcome = '{"kind": "canceled"}', secret_env = NULL
    FROM ended WHERE r.session_id = ended.id AND r.state = 'queued'
)
SELECT id FROM found
