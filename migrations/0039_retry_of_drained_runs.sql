-- What: a function that queues a run again whose command its worker ended.
-- Why:  a worker that shuts down hands back what may be retried, at once and under its lease. That deletes the output of
--       the run, which the role of workers may not do in general.
-- Lock: none.

-- Queues a run again if its caller allowed another attempt and the worker holds the lease under which it runs. Returns
-- whether it did. Only live runs have output that it deletes.
CREATE FUNCTION retry_run(run uuid, holder text, holder_incarnation uuid, epoch bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    -- The end of the session and a change of its lease wait until this run is visible as queued.
    PERFORM 1 FROM live_runs r JOIN sessions s ON s.id = r.session_id WHERE r.id = run FOR SHARE OF s;
    UPDATE live_runs r SET state = 'queued', attempt = r.attempt + 1, queued_until = now() + r.queue_timeout,
                           worker_id = NULL, incarnation = NULL, lease_epoch = NULL
    FROM sessions s, workers w
    WHERE r.id = run AND r.state = 'running' AND r.attempt <= r.retries AND r.cancel_requested_at IS NULL
      AND r.worker_id = holder AND r.incarnation = holder_incarnation AND r.lease_epoch = epoch
      AND s.id = r.session_id AND s.state = 'open'
      AND s.lease_worker || '' = holder AND s.lease_incarnation = holder_incarnation AND s.lease_epoch = epoch
      AND w.id = holder AND w.incarnation = holder_incarnation AND w.lease_until > now();
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    WITH deleted AS (
        DELETE FROM run_output WHERE run_id = run RETURNING object
    )
    INSERT INTO output_removals SELECT DISTINCT object FROM deleted WHERE object IS NOT NULL ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
