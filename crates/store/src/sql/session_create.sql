-- Creates a session unless the tenant has $10 open sessions already.
INSERT INTO sessions (id, tenant_id, alias, spec, labels, expires_at, idle_ttl, idempotency_key, request_hash,
                      allow_data_loss, checked_at, check_at)
SELECT $1, $2, $3, $4, $5, now() + $6::interval, $7, $8, $9, $11, now(),
       -- As in session_check.sql.
       now() + least($6::interval, $7, interval '15 minutes')
WHERE (SELECT count(*) FROM sessions WHERE open_tenant = $2) < $10
ON CONFLICT (tenant_id, idempotency_key) DO NOTHING
RETURNING id
