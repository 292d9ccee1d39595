-- no-transaction
-- What: finds sessions by the worker and the incarnation that hold them.
-- Why:  a sweep reads only the leases of dead incarnations, however many sessions are leased.
-- Lock: none that blocks reads or writes. If it is interrupted, drop the index sessions_by_holder and migrate again.

CREATE INDEX CONCURRENTLY sessions_by_holder ON sessions (lease_worker, lease_incarnation) WHERE lease_worker IS NOT NULL;
