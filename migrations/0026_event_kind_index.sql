-- no-transaction
-- What: finds the events of a tenant by kind, in the order of their ids.
-- Why:  lists of one kind, and the deletion of kinds that are not kept for audits, read only their rows.
-- Lock: none that blocks reads or writes. If it is interrupted, drop the index events_by_kind and migrate again.

CREATE INDEX CONCURRENTLY events_by_kind ON events (tenant_id, kind, id);
