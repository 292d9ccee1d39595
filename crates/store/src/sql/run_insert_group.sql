-- Inserts runs as run_insert.sql does, those that count no quota and need nothing special, into sessions that a ready
-- worker holds. Does nothing for any other run and for one whose session is locked: run_insert.sql decides about it.
WITH request AS (
    SELECT * FROM ROWS FROM (
        jsonb_to_recordset($1) AS (id uuid, session_id uuid, tenant_id text, spec jsonb, labels jsonb, retries integer,
                                   idempotency_key text, traceparent text, requested_by uuid, key_id uuid,
                                   key_version bigint, tenant_version bigint, policy_version bigint),
        unnest($2::bytea[], $3::bytea[], $4::bytea[], $5::interval[], $7::uuid[], $8::timestamptz[], $9::text[], $10::bytea[])
    ) AS q (id, session_id, tenant_id, spec, labels, retries, idempotency_key, traceparent, requested_by, key_id,
            key_version, tenant_version, policy_version,
            settings_hash, request_hash, secret_env, queue_timeout, event_id, event_at, event_detail, event_mac)
),
admitted AS (
    SELECT q.*, w.id AS worker_id, w.incarnation, w.address, s.lease_epoch
    FROM request q
    -- With a limit, the planner finds each row by its id: it does not move the conditions below into these.
    CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = q.session_id LIMIT 1 FOR SHARE SKIP LOCKED) AS s
    CROSS JOIN LATERAL (SELECT * FROM workers WHERE id = s.lease_worker LIMIT 1) AS w
    WHERE s.tenant_id = q.tenant_id AND s.state = 'open' AND s.expires_at > now() AND s.quarantine_reason IS NULL
      AND w.incarnation = s.lease_incarnation AND w.lease_until > now() AND w.state = 'ready'
      AND (SELECT used_day FROM run_settings WHERE hash = q.settings_hash)
              >= greatest(run_day(q.id), (now() AT TIME ZONE 'UTC')::date - 1)
      AND (q.key_version IS NULL OR (
               SELECT k.xmin::text::bigint = q.key_version AND t.xmin::text::bigint = q.tenant_version
                      AND coalesce(k.expires_at > now(), true)
                      AND (SELECT p.version FROM tenant_policies p WHERE p.tenant_id = t.id
                           ORDER BY p.version DESC LIMIT 1) IS NOT DISTINCT FROM q.policy_version
               FROM api_keys k JOIN tenants t ON t.id = k.tenant_id
               WHERE k.id = q.key_id AND k.tenant_id = q.tenant_id))
),
keyed AS (
    INSERT INTO run_keys (session_id, idempotency_key, run_id, request_hash)
    SELECT session_id, idempotency_key, id, request_hash FROM admitted WHERE idempotency_key IS NOT NULL
    -- Statements of several processes wait for each other in the same order.
    ORDER BY session_id, idempotency_key
    ON CONFLICT (session_id, idempotency_key) DO NOTHING
    RETURNING run_id
),
inserted AS (
    INSERT INTO live_runs (id, session_id, tenant_id, spec, settings_hash, labels, retries, secret_env, queue_timeout,
                           queued_until, state, worker_id, incarnation, lease_epoch, requested_by, traceparent)
    SELECT a.id, a.session_id, a.tenant_id, a.spec, a.settings_hash, a.labels, a.retries, a.secret_env, a.queue_timeout,
           now() + a.queue_timeout, 'running', a.worker_id, a.incarnation, a.lease_epoch, a.requested_by, a.traceparent
    FROM admitted a
    WHERE a.idempotency_key IS NULL OR a.id IN (SELECT run_id FROM keyed)
    RETURNING id, created_at
),
labeled AS (
    INSERT INTO run_labels (token, run_id)
    SELECT unnest(label_tokens(a.tenant_id, a.labels)), a.id
    FROM inserted i JOIN admitted a ON a.id = i.id WHERE a.labels <> '{}'
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, key_id, detail, mac)
    SELECT $6, a.event_id, a.event_at, 'RUN_ADMITTED', a.tenant_id, a.session_id, a.id, a.key_id, a.event_detail, a.event_mac
    FROM inserted i JOIN admitted a ON a.id = i.id
)
SELECT i.id, i.created_at, a.worker_id, a.incarnation, a.address, a.lease_epoch
FROM inserted i JOIN admitted a ON a.id = i.id
