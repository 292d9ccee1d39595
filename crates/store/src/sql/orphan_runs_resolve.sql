-- Resolves runs ($1, locked by the caller) that a dead worker may have started: queues them again
-- if their caller allowed retries, else ends them as lost. Repeats the condition under the lock.
WITH orphans AS (
    SELECT r.id, r.attempt <= r.retries AND r.cancel_requested_at IS NULL AND s.state = 'open' AS retry
    FROM runs r JOIN sessions s ON s.id = r.session_id
    WHERE r.id = ANY ($1) AND r.state = 'running'
      AND NOT EXISTS (SELECT 1 FROM workers w
                      WHERE w.id = r.worker_id AND w.incarnation = r.incarnation AND w.lease_until > now())
),
retried AS (
    UPDATE runs r SET state = 'queued', attempt = r.attempt + 1,
                      queued_until = now() + r.queue_timeout,
                      worker_id = NULL, incarnation = NULL, lease_epoch = NULL
    FROM orphans o WHERE r.id = o.id AND o.retry
    RETURNING r.id
),
deleted_output AS (
    DELETE FROM run_output USING retried WHERE run_id = retried.id
),
lost AS (
    UPDATE runs r SET state = 'ended', ended_at = now(), outcome = '{"kind": "lost"}', secret_env = NULL,
        output_bytes = (SELECT coalesce(sum(octet_length(data)), 0) FROM run_output WHERE run_id = r.id)
    FROM orphans o WHERE r.id = o.id AND NOT o.retry
    RETURNING r.id
)
SELECT (SELECT count(*) FROM retried) AS "retried!", (SELECT count(*) FROM lost) AS "lost!"
