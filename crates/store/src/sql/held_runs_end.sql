-- Ends the held runs that wait for the approvals $1, each with its outcome in $2. The caller has decided about the
-- approvals in the same transaction.
WITH due AS (
    SELECT r.id, o.outcome
    FROM unnest($1::uuid[], $2::jsonb[]) AS o (approval, outcome)
    CROSS JOIN LATERAL (SELECT run_id FROM approvals WHERE id = o.approval LIMIT 1) AS a
    CROSS JOIN LATERAL (SELECT id FROM live_runs
                        WHERE id = a.run_id AND state = 'held' AND approval_id = o.approval LIMIT 1) AS r
),
deleted AS (
    DELETE FROM live_runs r USING due WHERE r.id = due.id AND r.state = 'held' RETURNING r.*
)
INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
                        cancel_reason, created_at, ended_at, outcome)
SELECT d.id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
       cancel_reason, created_at, now(), due.outcome
FROM deleted d JOIN due ON due.id = d.id
