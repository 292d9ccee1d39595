-- Open sessions with queued runs that nobody live holds; each tenant's longest waiting one first.
SELECT wanted.id FROM (
    SELECT s.id, row_number() OVER (PARTITION BY s.tenant_id ORDER BY q.first_run) AS turn, q.first_run
    FROM (SELECT session_id, min(created_at) AS first_run FROM runs WHERE state = 'queued' GROUP BY session_id) q
    JOIN sessions s ON s.id = q.session_id
    JOIN workers me ON me.id = $1 AND me.incarnation = $2
    WHERE s.state = 'open' AND s.expires_at > now()
      AND s.spec ->> 'mode' = ANY (me.modes)
      AND (s.home_root IS NULL OR s.home_root = me.root_id
           -- As in lease_acquire.sql.
           OR (s.allow_data_loss AND root_is_gone(s.home_root)))
      AND NOT EXISTS (SELECT 1 FROM workers holder
                      WHERE holder.id = s.lease_worker AND holder.incarnation = s.lease_incarnation
                        AND holder.lease_until > now())
) AS wanted
ORDER BY wanted.turn, wanted.first_run
LIMIT $3
