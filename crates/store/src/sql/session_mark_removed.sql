-- Records that the directories of the ended sessions $1 are removed from the root $2, with the changes that they held.
WITH removed AS (
    UPDATE sessions s SET removed_at = now(), lease_worker = NULL, lease_incarnation = NULL
    WHERE s.id = ANY ($1) AND s.state = 'ended' AND s.removed_at IS NULL
      -- `|| ''` keeps the planner from the index of roots, which has all ended sessions of the root.
      AND s.home_root || '' = $2::uuid || ''
      -- Not EXISTS, which the planner may turn into a read of all runs.
      AND (SELECT r.id FROM live_runs r WHERE r.session_id = s.id AND r.state = 'running' LIMIT 1) IS NULL
    RETURNING s.id
),
freed AS (
    DELETE FROM held_changes h USING removed WHERE h.session_id = removed.id RETURNING h.run_id
)
UPDATE ended_runs r SET changes = jsonb_set(r.changes, '{state}', '"dropped"')
FROM freed WHERE r.id = freed.run_id AND r.changes ->> 'state' = 'held'
