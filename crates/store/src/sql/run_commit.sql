-- Ends a run with its result, the rest of its output and its events, if the worker still holds the
-- lease. The session is found by its id: `|| ''` keeps the planner from reading all sessions that the worker holds.
WITH ended AS (
    DELETE FROM live_runs r USING sessions s, workers w
    WHERE r.id = $1 AND r.state = 'running'
      AND r.worker_id = $2 AND r.incarnation = $3 AND r.lease_epoch = $4
      -- No other worker acquired the session,
      AND s.id = r.session_id AND s.lease_worker || '' = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4
      -- and the worker's leases have not expired.
      AND w.id = $2 AND w.incarnation = $3 AND w.lease_until > now()
    RETURNING r.*
),
committed AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
                            worker_id, incarnation, lease_epoch, created_at, started_at, ended_at, output_bytes, result, changes)
    SELECT id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
           worker_id, incarnation, lease_epoch, created_at, now() - $6::interval, now(),
           -- A decision about held changes comes later.
           ($5::jsonb -> 'output_bytes')::bigint, $5 - 'changes', $5 -> 'changes'
    FROM ended
    RETURNING id, session_id, tenant_id, attempt, started_at, ended_at, cancel_reason, output_bytes
),
stored AS (
    INSERT INTO run_output (run_id, position, stream, stream_offset, data, object, object_offset, length)
    SELECT committed.id, c.position, c.stream, c.stream_offset, c.data, $10, c.object_offset, c.length
    FROM committed, ROWS FROM (
        jsonb_to_recordset($8) AS (position bigint, stream smallint, stream_offset bigint, object_offset integer, length integer),
        unnest($9::bytea[])
    ) AS c (position, stream, stream_offset, object_offset, length, data)
    ON CONFLICT (run_id, position) DO NOTHING
),
held AS (
    INSERT INTO held_changes (session_id, run_id, lease_epoch, root, expires_at)
    SELECT committed.session_id, committed.id, $4, w.root_id, now() + $7::interval
    FROM committed, workers w WHERE w.id = $2 AND $7::interval IS NOT NULL
    -- Nothing runs while a session holds changes: a row would be left over.
    ON CONFLICT (session_id) DO UPDATE
    SET run_id = excluded.run_id, lease_epoch = excluded.lease_epoch, root = excluded.root, expires_at = excluded.expires_at
),
counted AS (
    INSERT INTO output_changes (tenant_id, day, bytes)
    SELECT tenant_id, run_day(id), output_bytes FROM committed WHERE output_bytes > 0
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, worker_id, field, detail, mac)
    SELECT $11, a.id, a.at, a.kind, committed.tenant_id, committed.session_id, committed.id, $2, a.field, a.detail, a.mac
    FROM committed, unnest($12::uuid[], $13::timestamptz[], $14::text[], $15::text[], $16::text[], $17::bytea[])
        AS a (id, at, kind, field, detail, mac)
)
SELECT attempt, started_at, ended_at AS "ended_at!", cancel_reason FROM committed
