-- Decides about the changes of run $2 that session $1 holds, if the worker still holds the lease: $6 is what becomes of
-- them. The row of the session is locked: another worker that takes it waits, and then sees the decision.
WITH holder AS (
    SELECT h.session_id, h.run_id FROM held_changes h, sessions s, workers w
    WHERE h.session_id = $1 AND h.run_id = $2 AND s.id = $1
      AND s.lease_worker || '' = $3 AND s.lease_incarnation = $4 AND s.lease_epoch = $5
      AND w.id = $3 AND w.incarnation = $4 AND w.lease_until > now()
    FOR SHARE OF s
),
freed AS (
    DELETE FROM held_changes h USING holder WHERE h.session_id = holder.session_id
),
decided AS (
    UPDATE ended_runs r SET changes = jsonb_set(r.changes, '{state}', to_jsonb($6::text))
    FROM holder WHERE r.id = holder.run_id AND r.changes ->> 'state' = 'held'
    RETURNING r.tenant_id
)
SELECT tenant_id FROM decided
