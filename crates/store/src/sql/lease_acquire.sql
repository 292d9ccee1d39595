-- Takes an open session that nobody live holds. The caller has locked its row, so that this looks
-- at what is true now: a statement that waits for a lock goes on with what it saw of other tables.
UPDATE sessions s SET
    lease_worker = w.id, lease_incarnation = w.incarnation, lease_epoch = s.lease_epoch + 1, home_root = w.root_id
FROM workers w
WHERE s.id = $1 AND s.state = 'open' AND s.expires_at > now()
  AND w.id = $2 AND w.incarnation = $3 AND w.state = 'ready' AND w.lease_until > now()
  AND s.spec ->> 'mode' = ANY (w.modes)
  -- Its files, if it has any, are where this worker is.
  AND (s.home_root IS NULL OR s.home_root = w.root_id
       -- … or who had them is gone for longer than a restart takes, and its caller would rather go on without them.
       OR (s.allow_data_loss AND root_is_gone(s.home_root)))
  AND NOT EXISTS (SELECT 1 FROM workers holder
                  WHERE holder.id = s.lease_worker AND holder.incarnation = s.lease_incarnation
                    AND holder.lease_until > now())
RETURNING s.tenant_id, s.lease_epoch, s.allow_data_loss, s.spec AS "spec: Json<SessionSpec>"
