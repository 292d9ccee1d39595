-- Ends a session whose files its holder cannot find, and refuses its queued runs.
WITH lost AS (
    UPDATE sessions SET state = 'ended', end_reason = 'data_lost', ended_at = now()
    WHERE id = $1 AND state = 'open' AND lease_worker = $2 AND lease_incarnation = $3 AND lease_epoch = $4
    RETURNING id
)
UPDATE runs r SET state = 'ended', ended_at = now(), outcome = $5, secret_env = NULL
FROM lost WHERE r.session_id = lost.id AND r.state = 'queued'
