-- Inserts a run. One statement checks the session, the quotas and the idempotency key.
WITH session AS (
    SELECT s.id,
           s.state = 'open' AND s.expires_at > now() AS open, s.end_reason,
           -- The files are gone and the caller did not allow their loss. Checked only if no worker
           -- holds the session.
           w.id IS NULL AND s.home_root IS NOT NULL AND NOT s.allow_data_loss AND root_is_gone(s.home_root) AS lost,
           -- Set if a live, ready worker holds the session: the run is assigned to it immediately.
           w.id AS worker_id, w.incarnation, w.address, s.lease_epoch
    FROM sessions s
    LEFT JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
        AND w.lease_until > now() AND w.state = 'ready'
    WHERE s.id = $2 AND s.tenant_id = $3
    -- A release or acquisition of the lease waits until this run is visible.
    FOR KEY SHARE OF s
),
used AS (
    SELECT count(*) AS active, count(*) FILTER (WHERE state = 'queued') AS queued
    FROM runs WHERE active_tenant = $3
),
inserted AS (
    INSERT INTO runs (id, session_id, tenant_id, spec, labels, retries, idempotency_key, request_hash, summary, secret_env,
                      queue_timeout, queued_until, state, worker_id, incarnation, lease_epoch)
    SELECT $1, session.id, $3, $4, $5, $6, $7, $8, $11, $12,
           $13, now() + $13::interval,
           CASE WHEN session.worker_id IS NULL THEN 'queued' ELSE 'running' END,
           session.worker_id, session.incarnation,
           CASE WHEN session.worker_id IS NOT NULL THEN session.lease_epoch END
    FROM session, used
    WHERE session.open AND NOT session.lost AND used.active < $9 AND used.queued < $10
    ON CONFLICT (session_id, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING created_at
)
SELECT session.open AS "open!", session.lost AS "lost!", session.end_reason AS "end_reason?", used.active AS "active!", used.queued AS "queued!",
       inserted.created_at AS "created_at?",
       session.worker_id AS "worker_id?", session.incarnation AS "incarnation?",
       session.address AS "address?", session.lease_epoch AS "lease_epoch!"
FROM session CROSS JOIN used LEFT JOIN inserted ON true
