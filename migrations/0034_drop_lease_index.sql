-- What: drops the index that sessions_by_holder replaces.
-- Why:  each index costs every change of a lease.
-- Lock: ACCESS EXCLUSIVE on sessions for a moment.

DROP INDEX sessions_by_lease;
