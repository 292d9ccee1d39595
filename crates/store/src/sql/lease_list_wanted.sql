-- Sessions that wait for a worker and that this one may take, with whether they really wait, and whether this worker
-- holds them and does not know of their queued runs. Reads the first tenants after a random number and the first sessions of each, never the whole queue. Returns the first session of each tenant
-- before the second of any.
WITH RECURSIVE start AS MATERIALIZED (
    SELECT floor(random() * 4294967296)::bigint - 2147483648 AS hash
),
-- The parts of the index to read: for each mode the sessions without files and those with files here, from the random
-- number on and up to it.
part AS (
    SELECT root, mode, range.low, range.high
    FROM workers me
    CROSS JOIN LATERAL (VALUES (uuid '00000000-0000-0000-0000-000000000000'), (me.root_id)) AS roots (root)
    CROSS JOIN LATERAL unnest(me.modes) AS mode
    CROSS JOIN start
    CROSS JOIN LATERAL (VALUES (start.hash, 2147483647), (-2147483648, start.hash - 1)) AS range (low, high)
    WHERE me.id = $1 AND me.incarnation = $2
      -- Without space, only sessions that have their files here.
      AND NOT (me.disk_is_short AND root = uuid '00000000-0000-0000-0000-000000000000')
),
tenant AS (
    SELECT p.root, p.mode, p.high, t.tenant_hash, t.tenant_id, 1 AS number
    FROM part p CROSS JOIN LATERAL (
        SELECT w.tenant_hash, w.tenant_id FROM waiting_sessions w
        WHERE w.root = p.root AND w.mode = p.mode AND w.tenant_hash >= p.low AND w.tenant_hash <= p.high
        ORDER BY w.tenant_hash, w.tenant_id LIMIT 1
    ) AS t
    UNION ALL
    SELECT p.root, p.mode, p.high, t.tenant_hash, t.tenant_id, p.number + 1
    FROM tenant p CROSS JOIN LATERAL (
        SELECT w.tenant_hash, w.tenant_id FROM waiting_sessions w
        WHERE w.root = p.root AND w.mode = p.mode
          AND (w.tenant_hash, w.tenant_id) > (p.tenant_hash, p.tenant_id) AND w.tenant_hash <= p.high
        ORDER BY w.tenant_hash, w.tenant_id LIMIT 1
    ) AS t
    WHERE p.number < $3::bigint
),
candidate AS MATERIALIZED (
    SELECT w.session_id, w.tenant_id, w.since
    FROM tenant t CROSS JOIN LATERAL (
        SELECT w.session_id, w.tenant_id, w.since FROM waiting_sessions w
        WHERE w.root = t.root AND w.mode = t.mode AND w.tenant_hash = t.tenant_hash AND w.tenant_id = t.tenant_id
        ORDER BY w.since, w.session_id
        -- Some more than the share of a tenant: other tenants may have fewer.
        LIMIT (SELECT 8 + 2 * $3::bigint / greatest(count(*), 1) FROM tenant)
    ) AS w
),
checked AS MATERIALIZED (
    SELECT c.session_id, c.tenant_id, c.since,
           s.state = 'open' AND s.expires_at > now()
               -- Not EXISTS, which the planner may turn into a read of the whole queue.
               AND (SELECT r.id FROM live_runs r WHERE r.session_id = c.session_id AND r.state = 'queued' LIMIT 1) IS NOT NULL AS has_runs,
           EXISTS (SELECT 1 FROM workers holder
                   WHERE holder.id = s.lease_worker AND holder.incarnation = s.lease_incarnation
                     AND holder.lease_until > now()) AS is_held,
           coalesce(s.lease_worker = $1 AND s.lease_incarnation = $2, false) AS is_ours
    FROM candidate c
    -- The limit keeps the planner from reading all sessions for a join.
    CROSS JOIN LATERAL (SELECT * FROM sessions WHERE id = c.session_id LIMIT 1) AS s
)
SELECT session_id AS "id!", has_runs AND NOT is_held AS "waits!", has_runs AND is_held AND is_ours AS "held!" FROM checked
ORDER BY row_number() OVER (PARTITION BY tenant_id, has_runs AND NOT is_held ORDER BY since, session_id), since, session_id
