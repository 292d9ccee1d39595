-- no-transaction
-- What: finds open sessions that are due.
-- Why:  the sweep reads only those, however many sessions there are.
-- Lock: none that blocks reads or writes. If it is interrupted, drop the index sessions_due and migrate again.

CREATE INDEX CONCURRENTLY sessions_due ON sessions (check_at) WHERE state = 'open';
