-- Creates a session unless the tenant has $10 open sessions already, or workers are alive and none has its mode $19.
-- Counts sessions only if $12 is set. Returns two random workers that may take the session, if there are two.
WITH used AS (
    SELECT count(*) AS open FROM sessions WHERE open_tenant = $2 AND $12::boolean
),
live AS (
    -- Without any live worker, runs are queued.
    SELECT coalesce(bool_or($19::text = ANY (modes)), true) AS has_mode
    FROM workers WHERE lease_until > now() AND state <> 'left' AND modes <> '{}'
),
created AS (
    INSERT INTO sessions (id, tenant_id, alias, spec, labels, expires_at, idle_ttl, idempotency_key, request_hash,
                          allow_data_loss, created_by, checked_at, check_at)
    SELECT $1, $2, $3, $4, $5, now() + $6::interval, $7, $8, $9, $11, $16, now(),
           -- As in session_check.sql.
           now() + least($6::interval, $7, interval '15 minutes')
    FROM used, live WHERE used.open < $10 AND live.has_mode
    ON CONFLICT (tenant_id, idempotency_key) DO NOTHING
    RETURNING created_at, expires_at
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, key_id, detail, mac)
    SELECT $13, $14, $15, 'SESSION_CREATED', $2, $1, $16, $17, $18 FROM created
),
candidates AS (
    SELECT w.id, w.incarnation, w.address, w.slots, w.busy_slots
    FROM workers w WHERE w.state = 'ready' AND w.lease_until > now() AND NOT w.disk_is_short AND $19 = ANY (w.modes)
    ORDER BY random() LIMIT 2
)
SELECT used.open AS "open!", live.has_mode AS "has_mode!", created.created_at AS "created_at?",
       created.expires_at AS "expires_at?",
       (SELECT coalesce(jsonb_agg(c), '[]') FROM candidates c) AS "candidates!: Json<Vec<WorkerCandidate>>"
FROM used CROSS JOIN live LEFT JOIN created ON true
