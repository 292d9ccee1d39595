-- Ends those of the queued runs $1 whose queue timeout has passed, with the outcomes $2.
WITH due AS (
    SELECT id FROM live_runs WHERE id = ANY ($1) AND state = 'queued' AND queued_until <= now()
    FOR UPDATE SKIP LOCKED
),
deleted AS (
    DELETE FROM live_runs r USING due WHERE r.id = due.id RETURNING r.*
),
ended AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
                            cancel_reason, created_at, ended_at, result)
    SELECT d.id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
           cancel_reason, created_at, now(), jsonb_build_object('outcome', o.outcome)
    FROM deleted d JOIN unnest($1::uuid[], $2::jsonb[]) AS o (run, outcome) ON o.run = d.id
    RETURNING id, tenant_id, session_id
)
INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, detail, mac)
SELECT $3, a.id, a.at, 'RUN_ENDED', e.tenant_id, e.session_id, e.id, a.detail, a.mac
FROM ended e JOIN unnest($1, $4::uuid[], $5::timestamptz[], $6::text[], $7::bytea[]) AS a (run, id, at, detail, mac)
    ON a.run = e.id
