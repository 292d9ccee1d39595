-- Ends queued and held runs of the sessions $1, at most $2, as ending_sessions says. These sessions have ended, so no queued run is
-- added and none begins. Rows are locked in the order of their ids: the caller and the upkeep may do this at once.
WITH due AS MATERIALIZED (
    SELECT r.id, e.outcome
    FROM ending_sessions e CROSS JOIN LATERAL (
        (SELECT r.id FROM live_runs r
         WHERE r.session_id = e.session_id AND r.state = 'queued' ORDER BY r.id LIMIT $2)
        UNION ALL
        (SELECT r.id FROM live_runs r
         WHERE r.session_id = e.session_id AND r.state = 'held' ORDER BY r.id LIMIT $2)
    ) AS r
    WHERE e.session_id = ANY ($1)
    LIMIT $2
),
locked AS MATERIALIZED (
    SELECT id FROM live_runs WHERE id = ANY (ARRAY(SELECT id FROM due)) AND state IN ('held', 'queued') ORDER BY id FOR UPDATE
),
deleted AS (
    DELETE FROM live_runs r USING locked WHERE r.id = locked.id RETURNING r.*
),
withdrawn AS (
    UPDATE approvals SET state = 'expired', decided_at = now(), changed_at = now(), reason = 'the run ended'
    WHERE id = ANY (ARRAY(SELECT approval_id FROM deleted WHERE approval_id IS NOT NULL)) AND state = 'pending'
)
INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
                        cancel_reason, created_at, ended_at, outcome)
SELECT d.id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at,
       cancel_reason, created_at, now(), due.outcome
FROM deleted d JOIN due ON due.id = d.id
