-- Inserts the run $4. One statement checks the session, the idempotency key, the settings $5 that the run refers to,
-- the key if the run has its version and, if $11 is set, the quotas. A run with an approval $8 is held: no worker finds it until the
-- approval is allowed.
WITH run AS (
    SELECT * FROM jsonb_to_record($4)
        AS run (spec jsonb, summary jsonb, labels jsonb, retries integer, traceparent text, requested_by uuid,
                key_version bigint, tenant_version bigint, policy_version bigint)
),
session AS (
    SELECT s.id,
           s.state = 'open' AND s.expires_at > now() AS open, s.end_reason, s.quarantine_reason,
           -- The files are gone and the caller did not allow their loss. Checked only if no worker
           -- holds the session.
           w.id IS NULL AND s.home_root IS NOT NULL AND NOT s.allow_data_loss AND root_is_gone(s.home_root) AS lost,
           -- Nobody else tells a worker of the run that waits: not one that will hold the session, nor a holder
           -- that is not ready now. If the session was acquired while this statement waited for its lock, then
           -- s is current and w is missing.
           w.state IS DISTINCT FROM 'ready' AND $8::uuid IS NULL AS waits,
           -- Set if a live, ready worker holds the session: the run is assigned to it immediately.
           CASE WHEN w.state = 'ready' AND $8 IS NULL THEN w.id END AS worker_id,
           CASE WHEN w.state = 'ready' AND $8 IS NULL THEN w.incarnation END AS incarnation,
           CASE WHEN w.state = 'ready' AND $8 IS NULL THEN w.address END AS address,
           s.lease_epoch,
           CASE WHEN w.state IS DISTINCT FROM 'ready' THEN s.spec ->> 'mode' END AS mode, s.home_root, s.allow_data_loss
    FROM sessions s
    LEFT JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
        AND w.lease_until > now()
    WHERE s.id = $2 AND s.tenant_id = $3
    -- The end of the session and a change of its lease wait until this run is visible.
    FOR SHARE OF s
),
used AS (
    SELECT count(*) AS active, count(*) FILTER (WHERE state <> 'running') AS queued
    FROM live_runs WHERE tenant_id = $3 AND $11::bigint IS NOT NULL
),
known AS (
    -- Upkeep deletes settings that were not used for some days: these cannot be deleted while this statement runs.
    SELECT $5::bytea IS NULL
        OR EXISTS (SELECT 1 FROM run_settings
                   WHERE hash = $5 AND used_day >= greatest(run_day($1), (now() AT TIME ZONE 'UTC')::date - 1)) AS settings
),
caller AS (
    -- The rows that key_authenticate read are the same, so the key is not revoked and its tenant not suspended.
    SELECT run.key_version IS NULL
        OR EXISTS (SELECT 1 FROM api_keys k JOIN tenants t ON t.id = k.tenant_id
                   WHERE k.id = $16 AND k.tenant_id = $3
                     AND k.xmin::text::bigint = run.key_version AND t.xmin::text::bigint = run.tenant_version
                     AND coalesce(k.expires_at > now(), true)
                     AND (SELECT p.version FROM tenant_policies p WHERE p.tenant_id = t.id
                          ORDER BY p.version DESC LIMIT 1) IS NOT DISTINCT FROM run.policy_version) AS is_same
    FROM run
),
admitted AS (
    SELECT session.* FROM session, used, known, caller
    WHERE caller.is_same AND session.open AND session.quarantine_reason IS NULL AND NOT session.lost
      AND known.settings AND coalesce(used.active < $11 AND used.queued < $12, true)
),
keyed AS (
    INSERT INTO run_keys (session_id, idempotency_key, run_id, request_hash)
    SELECT id, $9, $1, $10 FROM admitted WHERE $9::text IS NOT NULL
    ON CONFLICT (session_id, idempotency_key) DO NOTHING
    RETURNING run_id
),
inserted AS (
    INSERT INTO live_runs (id, session_id, tenant_id, spec, settings_hash, labels, retries, summary, secret_env,
                           queue_timeout, queued_until, state, worker_id, incarnation, lease_epoch, approval_id, requested_by,
                           traceparent)
    SELECT $1, a.id, $3, run.spec, $5, run.labels, run.retries, run.summary, $6,
           $7, now() + $7::interval,
           CASE WHEN $8 IS NOT NULL THEN 'held' WHEN a.worker_id IS NULL THEN 'queued' ELSE 'running' END,
           a.worker_id, a.incarnation,
           CASE WHEN a.worker_id IS NOT NULL THEN a.lease_epoch END,
           $8, run.requested_by, run.traceparent
    FROM admitted a, run
    WHERE $9::text IS NULL OR EXISTS (SELECT 1 FROM keyed)
    RETURNING created_at
),
labeled AS (
    INSERT INTO run_labels (token, run_id)
    SELECT unnest(label_tokens($3, run.labels)), $1 FROM inserted, run WHERE run.labels <> '{}'
),
waiting AS (
    INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
    SELECT a.id, $3, a.mode, coalesce(a.home_root, '00000000-0000-0000-0000-000000000000'), a.allow_data_loss
    FROM admitted a, inserted WHERE a.waits
    ON CONFLICT (session_id) DO NOTHING
),
-- The event of the audit: nothing runs without one.
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, key_id, detail, mac)
    SELECT $13, $14, $15, 'RUN_ADMITTED', $3, $2, $1, $16, $17, $18 FROM inserted
)
SELECT session.open AS "open!", session.lost AS "lost!", session.end_reason AS "end_reason?",
       session.quarantine_reason AS "quarantine_reason?", used.active AS "active!", used.queued AS "queued!",
       inserted.created_at AS "created_at?",
       session.worker_id AS "worker_id?", session.incarnation AS "incarnation?",
       session.address AS "address?", session.lease_epoch AS "lease_epoch!", known.settings AS "settings_known!",
       caller.is_same AS "key_is_same!"
FROM session CROSS JOIN used CROSS JOIN known CROSS JOIN caller LEFT JOIN inserted ON true
