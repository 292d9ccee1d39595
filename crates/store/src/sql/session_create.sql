-- Creates a session unless the tenant has $10 open sessions already. Counts them only if $12 is set.
WITH used AS (
    SELECT count(*) AS open FROM sessions WHERE open_tenant = $2 AND $12::boolean
),
created AS (
    INSERT INTO sessions (id, tenant_id, alias, spec, labels, expires_at, idle_ttl, idempotency_key, request_hash,
                          allow_data_loss, created_by, checked_at, check_at)
    SELECT $1, $2, $3, $4, $5, now() + $6::interval, $7, $8, $9, $11, $16, now(),
           -- As in session_check.sql.
           now() + least($6::interval, $7, interval '15 minutes')
    FROM used WHERE used.open < $10
    ON CONFLICT (tenant_id, idempotency_key) DO NOTHING
    RETURNING id
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, key_id, detail, mac)
    SELECT $13, $14, $15, 'SESSION_CREATED', $2, $1, $16, $17, $18 FROM created
)
SELECT used.open AS "open!" FROM used, created
