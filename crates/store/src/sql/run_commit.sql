-- Ends a run with its result, the rest of its output and its events, if the worker still holds the
-- lease.
WITH committed AS (
    UPDATE runs r SET
        state = 'ended', ended_at = now(), outcome = $5, exit_code = $6, usage = $7, receipt = $8,
        sandbox_root = $9, started_at = now() - $10::interval, setup_micros = $11, prepared = $12,
        unenforced = $13, watched = $25, output_bytes = $14, output_truncated = $15, output_total = $26, violations = $20,
        secret_env = NULL
    FROM sessions s, workers w
    WHERE r.id = $1 AND r.state = 'running'
      AND r.worker_id = $2 AND r.incarnation = $3 AND r.lease_epoch = $4
      -- No other worker acquired the session,
      AND s.id = r.session_id AND s.lease_worker = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4
      -- and the worker's leases have not expired.
      AND w.id = $2 AND w.incarnation = $3 AND w.lease_until > now()
    RETURNING r.id, r.session_id, r.tenant_id, r.attempt, r.started_at, r.ended_at, r.cancel_reason
),
stored AS (
    INSERT INTO run_output (run_id, position, stream, stream_offset, data)
    SELECT committed.id, c.position, c.stream, c.stream_offset, c.data
    FROM committed, unnest($16::bigint[], $17::smallint[], $18::bigint[], $19::bytea[])
        AS c (position, stream, stream_offset, data)
    ON CONFLICT (run_id, position) DO NOTHING
),
recorded_events AS (
    INSERT INTO events (id, kind, tenant_id, session_id, run_id, worker_id, field, detail)
    SELECT e.id, e.kind, committed.tenant_id, committed.session_id, committed.id, $2, e.field, e.detail
    FROM committed, unnest($21::uuid[], $22::text[], $23::text[], $24::jsonb[]) AS e (id, kind, field, detail)
)
SELECT attempt AS "attempt!", started_at AS "started_at?", ended_at AS "ended_at!", cancel_reason AS "cancel_reason?" FROM committed
UNION ALL
-- A repeated commit, whose first answer was lost, succeeds if it was made under the same lease.
SELECT attempt, started_at, ended_at, cancel_reason FROM runs
WHERE id = $1 AND state = 'ended' AND outcome ->> 'kind' <> 'lost'
  AND worker_id = $2 AND incarnation = $3 AND lease_epoch = $4
