-- Sessions whose holder is dead: those of earlier incarnations, and all of a worker whose lease has expired. Reads
-- nothing of the sessions of live workers.
SELECT s.id AS "id!"
FROM workers w CROSS JOIN LATERAL (
    (SELECT id FROM sessions WHERE lease_worker = w.id AND lease_incarnation < w.incarnation LIMIT $1)
    UNION ALL
    (SELECT id FROM sessions WHERE lease_worker = w.id AND lease_incarnation > w.incarnation LIMIT $1)
    UNION ALL
    (SELECT id FROM sessions
     WHERE lease_worker = w.id AND lease_incarnation = w.incarnation AND w.lease_until <= now() LIMIT $1)
) AS s
LIMIT $1
