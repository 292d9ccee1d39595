-- Queues the held run $1, whose approval $2 is allowed. The caller has locked the session's row and the run's.
WITH queued AS (
    UPDATE live_runs SET state = 'queued', approval_id = NULL, queued_until = now() + queue_timeout
    WHERE id = $1 AND state = 'held' AND approval_id = $2
    RETURNING session_id, tenant_id
),
waiting AS (
    INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
    SELECT s.id, queued.tenant_id, s.spec ->> 'mode',
           coalesce(s.home_root, '00000000-0000-0000-0000-000000000000'), s.allow_data_loss
    FROM queued CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = queued.session_id LIMIT 1) AS s
    -- Also if a worker holds the session: it looks for queued runs only where it expects them.
    WHERE s.state = 'open'
    ON CONFLICT (session_id) DO NOTHING
)
SELECT count(*) AS "queued!" FROM queued
