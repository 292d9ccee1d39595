-- Ends runs of one worker as run_commit.sql does, those whose result is small and has no events. Does nothing for a run
-- that another transaction has locked or whose lease is lost: run_commit.sql decides about it.
WITH request AS (
    SELECT * FROM unnest($4::uuid[], $5::bigint[], $6::jsonb[], $7::interval[], $8::uuid[], $9::timestamptz[], $10::text[],
                         $11::bytea[])
        AS q (id, lease_epoch, result, started_ago, event_id, event_at, event_detail, event_mac)
),
locked AS (
    SELECT r.id
    FROM request q
    -- With a limit, the planner finds each row by its id: it does not move the conditions below into these.
    CROSS JOIN LATERAL (SELECT * FROM live_runs WHERE id = q.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS r
    CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = r.session_id LIMIT 1) AS s
    WHERE r.state = 'running' AND r.worker_id = $1 AND r.incarnation = $2 AND r.lease_epoch = q.lease_epoch
      AND s.lease_worker = $1 AND s.lease_incarnation = $2 AND s.lease_epoch = q.lease_epoch
      AND EXISTS (SELECT FROM workers w WHERE w.id = $1 AND w.incarnation = $2 AND w.lease_until > now())
),
ended AS (
    DELETE FROM live_runs WHERE id = ANY (ARRAY(SELECT id FROM locked)) RETURNING *
),
committed AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
                            worker_id, incarnation, lease_epoch, created_at, started_at, ended_at, output_bytes, result)
    SELECT e.id, e.tenant_id, e.session_id, e.spec, e.settings_hash, e.summary, e.labels, e.attempt, e.cancel_requested_at, e.cancel_reason,
           e.worker_id, e.incarnation, e.lease_epoch, e.created_at, now() - q.started_ago, now(),
           (q.result -> 'output_bytes')::bigint, q.result
    FROM ended e JOIN request q ON q.id = e.id
    RETURNING id, session_id, tenant_id, attempt, started_at, ended_at, cancel_reason, output_bytes
),
stored AS (
    INSERT INTO run_output (run_id, position, stream, stream_offset, data)
    SELECT c.run_id, c.position, c.stream, c.stream_offset, c.data
    FROM unnest($12::uuid[], $13::bigint[], $14::smallint[], $15::bigint[], $16::bytea[])
        AS c (run_id, position, stream, stream_offset, data)
    WHERE c.run_id IN (SELECT id FROM committed)
    ON CONFLICT (run_id, position) DO NOTHING
),
counted AS (
    INSERT INTO output_changes (tenant_id, day, bytes)
    SELECT tenant_id, run_day(id), sum(output_bytes) FROM committed WHERE output_bytes > 0 GROUP BY 1, 2
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, worker_id, detail, mac)
    SELECT $3, q.event_id, q.event_at, 'RUN_ENDED', c.tenant_id, c.session_id, c.id, $1, q.event_detail, q.event_mac
    FROM committed c JOIN request q ON q.id = c.id
)
SELECT id, attempt, started_at, ended_at AS "ended_at!", cancel_reason FROM committed
