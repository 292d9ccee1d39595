-- Open sessions with queued runs that no live worker holds. Ranks the sessions of each tenant by
-- waiting time and returns all first ranks before all second ranks.
SELECT wanted.id FROM (
    SELECT s.id, row_number() OVER (PARTITION BY s.tenant_id ORDER BY q.first_run) AS rank, q.first_run
    FROM (SELECT session_id, min(created_at) AS first_run FROM runs WHERE state = 'queued' GROUP BY session_id) q
    JOIN sessions s ON s.id = q.session_id
    JOIN workers me ON me.id = $1 AND me.incarnation = $2
    WHERE s.state = 'open' AND s.expires_at > now()
      AND s.spec ->> 'mode' = ANY (me.modes)
      AND (s.home_root IS NULL OR s.home_root = me.root_id
           -- See lease_acquire.sql.
           OR (s.allow_data_loss AND root_is_gone(s.home_root)))
      AND NOT EXISTS (SELECT 1 FROM workers holder
                      WHERE holder.id = s.lease_worker AND holder.incarnation = s.lease_incarnation
                        AND holder.lease_until > now())
) AS wanted
ORDER BY wanted.rank, wanted.first_run
LIMIT $3
