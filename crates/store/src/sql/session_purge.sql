-- Deletes at most $2 ended sessions that are older than their tenant, or else $1, keeps them.
WITH old AS MATERIALIZED (
    SELECT s.id FROM tenants t CROSS JOIN LATERAL (
        SELECT id FROM sessions
        WHERE tenant_id = t.id AND removed_at IS NOT NULL
          AND ended_at < now() - coalesce(t.retention_runs, $1)
          -- Not a join, which could read all sessions.
          AND (SELECT r.id FROM live_runs r WHERE r.session_id = sessions.id LIMIT 1) IS NULL
        ORDER BY ended_at LIMIT $2) AS s
    LIMIT $2
),
deleted_keys AS (DELETE FROM run_keys WHERE session_id = ANY (ARRAY(SELECT id FROM old))),
deleted AS (DELETE FROM sessions WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id)
SELECT count(*) AS "count!" FROM deleted
