-- Ends the held runs $2 that wait for the approvals $1, each with its outcome in $3. The caller has decided about the
-- approvals in the same transaction.
WITH due AS (
    SELECT r.id, o.outcome
    FROM unnest($1::uuid[], $2::uuid[], $3::jsonb[]) AS o (approval, run, outcome)
    CROSS JOIN LATERAL (SELECT id FROM live_runs
                        WHERE id = o.run AND state = 'held' AND approval_id = o.approval LIMIT 1) AS r
),
deleted AS (
    DELETE FROM live_runs r USING due WHERE r.id = due.id AND r.state = 'held' RETURNING r.*
),
ended AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
                            cancel_reason, created_at, ended_at, result)
    SELECT d.id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
           cancel_reason, created_at, now(), jsonb_build_object('outcome', due.outcome)
    FROM deleted d JOIN due ON due.id = d.id
    RETURNING id, tenant_id, session_id
)
INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, detail, mac)
SELECT $4, a.id, a.at, 'RUN_ENDED', e.tenant_id, e.session_id, e.id, a.detail, a.mac
FROM ended e JOIN unnest($2, $5::uuid[], $6::timestamptz[], $7::text[], $8::bytea[]) AS a (run, id, at, detail, mac)
    ON a.run = e.id
