-- Requests the cancellation of a run and ends it if it is queued or held. The lock comes first: the state decides which of the
-- two statements applies, and a statement that waited for a lock would not look at the other state again.
WITH run AS (
    SELECT id, state FROM live_runs WHERE tenant_id || '' = $1 AND id = $2 FOR UPDATE
),
requested AS (
    UPDATE live_runs r SET
        cancel_requested_at = coalesce(r.cancel_requested_at, now()),
        cancel_reason = CASE WHEN r.cancel_requested_at IS NULL THEN $3 ELSE r.cancel_reason END,
        cancel_grace = least(r.cancel_grace, $4)
    FROM run WHERE r.id = run.id AND run.state = 'running'
),
canceled AS (
    DELETE FROM live_runs r USING run WHERE r.id = run.id AND run.state IN ('held', 'queued') RETURNING r.*
),
withdrawn AS (
    UPDATE approvals SET state = 'expired', decided_at = now(), changed_at = now(), reason = 'the run ended'
    WHERE id = ANY (ARRAY(SELECT approval_id FROM canceled WHERE approval_id IS NOT NULL)) AND state = 'pending'
),
ended AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
                            created_at, ended_at, result)
    SELECT id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, coalesce(cancel_requested_at, now()),
           CASE WHEN cancel_requested_at IS NULL THEN $3 ELSE cancel_reason END,
           created_at, now(), '{"outcome": {"kind": "canceled"}}'
    FROM canceled
    RETURNING id, tenant_id, session_id
)
INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, detail, mac)
SELECT $5, $6, $7, 'RUN_ENDED', tenant_id, session_id, id, $8, $9 FROM ended
