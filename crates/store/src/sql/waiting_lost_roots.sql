WITH RECURSIVE roots AS (
    (SELECT root FROM waiting_sessions
     WHERE allow_data_loss AND root > '00000000-0000-0000-0000-000000000000' ORDER BY root LIMIT 1)
    UNION ALL
    SELECT next.root FROM roots CROSS JOIN LATERAL (
        SELECT w.root FROM waiting_sessions w WHERE w.allow_data_loss AND w.root > roots.root ORDER BY w.root LIMIT 1
    ) AS next
),
gone AS (
    SELECT w.session_id FROM roots CROSS JOIN LATERAL (
        SELECT w.session_id FROM waiting_sessions w
        WHERE w.allow_data_loss AND w.root = roots.root LIMIT $1
    ) AS w
    WHERE root_is_gone(roots.root)
    LIMIT $1
)
UPDATE waiting_sessions w SET root = '00000000-0000-0000-0000-000000000000' FROM gone WHERE w.session_id = gone.session_id
