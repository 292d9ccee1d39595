-- Closes a session. Waits for runs that are being inserted; the caller cancels them next, in a statement that sees them.
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
)
SELECT found.id, ended.id IS NOT NULL AS "ended!" FROM found LEFT JOIN ended ON true
