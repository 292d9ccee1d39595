-- no-transaction
-- What: finds the sessions of a tenant that ended longest ago and whose directory is removed.
-- Why:  their rows are deleted in batches, however many others there are.
-- Lock: none that blocks reads or writes. If it is interrupted, drop the index sessions_to_purge and migrate again.

CREATE INDEX CONCURRENTLY sessions_to_purge ON sessions (tenant_id, ended_at) WHERE removed_at IS NOT NULL;
