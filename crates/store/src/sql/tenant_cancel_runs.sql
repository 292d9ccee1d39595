-- Cancels those of the runs $1 whose tenant is suspended, with the reason $2: running ones by a request to their worker,
-- others at once.
WITH due AS (
    SELECT r.id, r.state FROM tenants t JOIN live_runs r ON r.tenant_id = t.id
    WHERE r.id = ANY ($1::uuid[])
      AND t.suspended_at IS NOT NULL AND (r.state <> 'running' OR r.cancel_requested_at IS NULL)
    FOR UPDATE OF r SKIP LOCKED
),
requested AS (
    UPDATE live_runs r SET cancel_requested_at = now(), cancel_reason = $2
    FROM due WHERE r.id = due.id AND due.state = 'running'
),
canceled AS (
    DELETE FROM live_runs r USING due WHERE r.id = due.id AND due.state <> 'running' RETURNING r.*
),
withdrawn AS (
    UPDATE approvals SET state = 'expired', decided_at = now(), changed_at = now(), reason = $2
    WHERE id = ANY (ARRAY(SELECT approval_id FROM canceled WHERE approval_id IS NOT NULL)) AND state = 'pending'
),
ended AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt,
                            cancel_requested_at, cancel_reason, created_at, ended_at, result)
    SELECT id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt,
           coalesce(cancel_requested_at, now()),
           CASE WHEN cancel_requested_at IS NULL THEN $2 ELSE cancel_reason END,
           created_at, now(), '{"outcome": {"kind": "canceled"}}'
    FROM canceled
    RETURNING id, tenant_id, session_id
)
INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, detail, mac)
SELECT $3, a.id, a.at, 'RUN_ENDED', e.tenant_id, e.session_id, e.id, a.detail, a.mac
FROM ended e JOIN unnest($1, $4::uuid[], $5::timestamptz[], $6::text[], $7::bytea[])
    AS a (run, id, at, detail, mac) ON a.run = e.id
