-- Resolves runs ($1, locked by the caller with their sessions) that a dead worker may have started: queues them again
-- if their caller allowed retries and their session takes runs, else ends them as lost. Repeats the condition under the lock.
WITH orphans AS (
    SELECT r.id, r.attempt <= r.retries AND r.cancel_requested_at IS NULL
                 AND s.state = 'open' AND s.quarantined_at IS NULL AS retry
    FROM live_runs r JOIN sessions s ON s.id = r.session_id
    WHERE r.id = ANY ($1::uuid[]) AND r.state = 'running'
      AND NOT EXISTS (SELECT 1 FROM workers w
                      WHERE w.id = r.worker_id AND w.incarnation = r.incarnation AND w.lease_until > now())
),
retried AS (
    UPDATE live_runs r SET state = 'queued', attempt = r.attempt + 1,
                           queued_until = now() + r.queue_timeout,
                           worker_id = NULL, incarnation = NULL, lease_epoch = NULL
    FROM orphans o WHERE r.id = o.id AND o.retry
    RETURNING r.id, r.session_id
),
deleted_output AS (
    DELETE FROM run_output USING retried WHERE run_id = retried.id RETURNING object
),
removed_objects AS (
    INSERT INTO output_removals SELECT DISTINCT object FROM deleted_output WHERE object IS NOT NULL ON CONFLICT DO NOTHING
),
waiting AS (
    INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
    SELECT s.id, s.tenant_id, s.spec ->> 'mode', coalesce(s.home_root, '00000000-0000-0000-0000-000000000000'), s.allow_data_loss
    FROM sessions s
    WHERE s.id IN (SELECT session_id FROM retried)
      AND NOT EXISTS (SELECT 1 FROM workers w
                      WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation AND w.lease_until > now())
    ON CONFLICT (session_id) DO NOTHING
),
deleted AS (
    DELETE FROM live_runs r USING orphans o WHERE r.id = o.id AND NOT o.retry RETURNING r.*
),
lost AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
                            worker_id, incarnation, lease_epoch, created_at, ended_at, output_bytes, result)
    SELECT id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
           worker_id, incarnation, lease_epoch, created_at, now(), output.bytes,
           jsonb_build_object('outcome', '{"kind": "lost", "detail": "worker_lost"}'::jsonb, 'output_bytes', output.bytes)
    FROM deleted CROSS JOIN LATERAL (
        SELECT coalesce(sum(coalesce(length, octet_length(data))), 0) AS bytes FROM run_output WHERE run_id = deleted.id
    ) AS output
    RETURNING id, tenant_id, session_id, worker_id, output_bytes
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, worker_id, detail, mac)
    SELECT $2, a.id, a.at, 'RUN_ENDED', l.tenant_id, l.session_id, l.id, l.worker_id, a.detail, a.mac
    FROM lost l JOIN unnest($1, $3::uuid[], $4::timestamptz[], $5::text[], $6::bytea[]) AS a (run, id, at, detail, mac)
        ON a.run = l.id
),
counted AS (
    INSERT INTO output_changes (tenant_id, day, bytes)
    SELECT tenant_id, run_day(id), output_bytes FROM lost WHERE output_bytes > 0
)
SELECT (SELECT count(*) FROM retried) AS "retried!", (SELECT count(*) FROM lost) AS "lost!"
