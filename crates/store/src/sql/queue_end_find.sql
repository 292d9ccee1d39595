-- Queued and held runs of the sessions $1, at most $2, that end as ending_sessions says.
SELECT r.id AS "run!", r.session_id AS "session!", r.tenant_id AS "tenant!", e.outcome AS "outcome!: Json<Outcome>"
FROM ending_sessions e CROSS JOIN LATERAL (
    (SELECT r.id, r.session_id, r.tenant_id FROM live_runs r
     WHERE r.session_id = e.session_id AND r.state = 'queued' ORDER BY r.id LIMIT $2)
    UNION ALL
    (SELECT r.id, r.session_id, r.tenant_id FROM live_runs r
     WHERE r.session_id = e.session_id AND r.state = 'held' ORDER BY r.id LIMIT $2)
) AS r
WHERE e.session_id = ANY ($1)
LIMIT $2
