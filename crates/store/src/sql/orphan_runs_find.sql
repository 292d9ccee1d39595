-- Runs whose worker is dead: those of an earlier incarnation, and all of a worker whose lease has expired. Reads nothing
-- of the runs of live workers.
SELECT r.id AS "id!", r.session_id AS "session_id!"
FROM workers w CROSS JOIN LATERAL (
    (SELECT id, session_id FROM live_runs WHERE worker_id = w.id AND incarnation < w.incarnation LIMIT $1)
    UNION ALL
    (SELECT id, session_id FROM live_runs WHERE worker_id = w.id AND incarnation > w.incarnation LIMIT $1)
    UNION ALL
    (SELECT id, session_id FROM live_runs
     WHERE worker_id = w.id AND incarnation = w.incarnation AND w.lease_until <= now() LIMIT $1)
) AS r
LIMIT $1
