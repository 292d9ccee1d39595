-- Appends output to the run $1 if it runs under this lease. The row lock makes this statement wait for a transaction that
-- takes the run away from the worker. A worker repeats a flush whose answer was lost, with the same chunks.
WITH run AS (
    SELECT r.id FROM live_runs r
    JOIN sessions s ON s.id = r.session_id
        -- Not by the index of holders, which has all sessions of the worker.
        AND s.lease_worker || '' = $2 AND s.lease_incarnation = $3 AND s.lease_epoch = $4
    JOIN workers w ON w.id = $2 AND w.incarnation = $3 AND w.lease_until > now()
    WHERE r.id = $1 AND r.state = 'running'
      AND r.worker_id = $2 AND r.incarnation = $3 AND r.lease_epoch = $4
    FOR SHARE OF r
),
stored AS (
    INSERT INTO run_output (run_id, position, stream, stream_offset, data, object, object_offset, length)
    SELECT run.id, c.position, c.stream, c.stream_offset, c.data, $7, c.object_offset, c.length
    FROM run, ROWS FROM (
        jsonb_to_recordset($5) AS (position bigint, stream smallint, stream_offset bigint,
                                   object_offset integer, length integer),
        unnest($6::bytea[])
    ) AS c (position, stream, stream_offset, object_offset, length, data)
    ON CONFLICT (run_id, position) DO NOTHING
)
SELECT count(*) AS "matched!" FROM run
