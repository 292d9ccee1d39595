-- Ends a run as lost, because its result is rejected, if it is assigned under this lease.
WITH abandoned AS (
    DELETE FROM live_runs r
    WHERE r.id = $1 AND r.state = 'running' AND r.worker_id = $2 AND r.incarnation = $3 AND r.lease_epoch = $4
    RETURNING r.*
),
ended AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
                            worker_id, incarnation, lease_epoch, created_at, ended_at, output_bytes, result)
    SELECT id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
           worker_id, incarnation, lease_epoch, created_at, now(), output.bytes,
           jsonb_build_object('outcome', '{"kind": "lost", "detail": "result_rejected"}'::jsonb, 'output_bytes', output.bytes)
    FROM abandoned CROSS JOIN LATERAL (
        SELECT coalesce(sum(coalesce(length, octet_length(data))), 0) AS bytes FROM run_output WHERE run_id = abandoned.id
    ) AS output
    RETURNING id, tenant_id, session_id, worker_id, output_bytes
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, worker_id, detail, mac)
    SELECT $5, $6, $7, 'RUN_ENDED', tenant_id, session_id, id, worker_id, $8, $9 FROM ended
),
counted AS (
    INSERT INTO output_changes (tenant_id, day, bytes)
    SELECT tenant_id, run_day(id), output_bytes FROM ended WHERE output_bytes > 0
)
SELECT count(*) AS "ended!" FROM ended
