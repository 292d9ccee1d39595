-- What: when the oldest queued run was created, as the owner of the upkeep saw it last.
-- Why:  every process reports how long runs wait, and workers are added by it.
-- Lock: ACCESS EXCLUSIVE on upkeep_owner, which has one row, for a moment. The new column is null.

ALTER TABLE upkeep_owner ADD COLUMN queue_oldest_at timestamptz;
