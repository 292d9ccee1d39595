-- Acquires the first lease on an open session, in one statement: no worker held the session, so there is no lease
-- holder to mark as expired and no run to resolve. If this statement waits for the session's row, it checks the row
-- again; what it saw of the worker may be older then, as if the worker had expired just after.
WITH leased AS (
    UPDATE sessions s SET
        lease_worker = w.id, lease_incarnation = w.incarnation, lease_epoch = s.lease_epoch + 1, home_root = w.root_id
    FROM workers w
    WHERE s.id = $1 AND s.state = 'open' AND s.expires_at > now()
      AND s.lease_epoch = 0 AND s.lease_worker IS NULL AND s.home_root IS NULL
      AND w.id = $2 AND w.incarnation = $3 AND w.state = 'ready' AND w.lease_until > now()
      AND NOT w.disk_is_short AND s.spec ->> 'mode' = ANY (w.modes)
    RETURNING s.id, s.tenant_id, s.lease_epoch, s.spec
),
-- A row that was written while this statement waited stays. The poll finds it and learns that a run is queued.
waiting AS (
    DELETE FROM waiting_sessions USING leased WHERE session_id = leased.id RETURNING session_id
)
SELECT leased.tenant_id, leased.lease_epoch, leased.spec AS "spec: Json<SessionSpec>",
       EXISTS (SELECT FROM waiting) AS "has_queue!"
FROM leased
