-- Finds ended runs of deleted tenants, at most $1 and about $2 bytes.
SELECT id AS "id!", tokens AS "tokens!" FROM (
    SELECT old.id, old.tokens, sum(old.bytes) OVER (ROWS UNBOUNDED PRECEDING) - old.bytes AS bytes_before
    FROM tenants t CROSS JOIN LATERAL (
        SELECT r.id, label_tokens(r.tenant_id, r.labels) AS tokens, r.output_bytes + pg_column_size(r.spec) AS bytes
        FROM ended_runs r WHERE r.tenant_id = t.id ORDER BY r.id LIMIT $1) AS old
    WHERE t.suspended_at IS NOT NULL AND t.deleted_at IS NOT NULL
    LIMIT $1
) AS counted
WHERE bytes_before < $2
