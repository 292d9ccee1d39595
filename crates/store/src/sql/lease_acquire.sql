-- Acquires the lease on an open session that no live worker holds. The caller has locked the
-- session's row, so that this statement sees current data: a statement that waits for a row lock
-- keeps its old snapshot of other tables.
UPDATE sessions s SET
    lease_worker = w.id, lease_incarnation = w.incarnation, lease_epoch = s.lease_epoch + 1, home_root = w.root_id
FROM workers w
WHERE s.id = $1 AND s.state = 'open' AND s.expires_at > now()
  AND w.id = $2 AND w.incarnation = $3 AND w.state = 'ready' AND w.lease_until > now()
  AND s.spec ->> 'mode' = ANY (w.modes)
  -- The session has no files and this worker has room for some, or it has them,
  AND ((s.home_root IS NULL AND NOT w.disk_is_short) OR s.home_root = w.root_id
       -- or the workers that had them are gone for longer than a restart takes and the caller
       -- allowed the loss.
       OR (s.allow_data_loss AND root_is_gone(s.home_root)))
  AND NOT EXISTS (SELECT 1 FROM workers holder
                  WHERE holder.id = s.lease_worker AND holder.incarnation = s.lease_incarnation
                    AND holder.lease_until > now())
RETURNING s.tenant_id, s.lease_epoch, s.allow_data_loss, s.spec AS "spec: Json<SessionSpec>"
