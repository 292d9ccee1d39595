-- Finds ended runs to delete, at most $4 and about $5 bytes: those of tenants that keep runs for a shorter time than $3,
-- after which whole days are dropped, and old ones in the default partition.
SELECT id AS "id!", tokens AS "tokens!" FROM (
    SELECT id, tokens, sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) - bytes AS bytes_before
    FROM (
        (SELECT old.* FROM tenants t
         CROSS JOIN LATERAL (SELECT coalesce(t.retention_runs, $1) AS keep) AS k
         CROSS JOIN LATERAL (
             SELECT r.id, label_tokens(r.tenant_id, r.labels) AS tokens, r.output_bytes + pg_column_size(r.spec) AS bytes
             FROM ended_runs r
             WHERE r.tenant_id = t.id AND r.id < run_id_at(now() - k.keep) AND r.ended_at < now() - k.keep
               -- The next check of an open session counts it as a use.
               AND NOT EXISTS (SELECT 1 FROM sessions s
                               WHERE s.id = r.session_id AND s.state = 'open' AND coalesce(s.checked_at, 'epoch') <= r.ended_at)
             ORDER BY r.id LIMIT $4) AS old
         WHERE k.keep < $3::interval
         LIMIT $4)
        UNION ALL
        (SELECT r.id, label_tokens(r.tenant_id, r.labels), r.output_bytes + pg_column_size(r.spec)
         FROM ended_runs_default r
         WHERE r.ended_at < now() - $2::interval
           AND NOT EXISTS (SELECT 1 FROM sessions s
                           WHERE s.id = r.session_id AND s.state = 'open' AND coalesce(s.checked_at, 'epoch') <= r.ended_at)
         LIMIT $4)
    ) AS found
) AS counted
WHERE bytes_before < $5
LIMIT $4
