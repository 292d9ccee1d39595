-- no-transaction
-- What: finds the open sessions of a tenant in the order of their ids.
-- Why:  a page of a list reads only its own rows.
-- Lock: none that blocks reads or writes. If it is interrupted, drop the index sessions_open and migrate again.

CREATE INDEX CONCURRENTLY sessions_open ON sessions (open_tenant, id) WHERE open_tenant IS NOT NULL;
