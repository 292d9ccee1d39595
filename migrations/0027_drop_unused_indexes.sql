-- What: drops indexes that no statement uses any more.
-- Why:  each costs every write; sessions_due, sessions_open and the order of ids replace them.
-- Lock: ACCESS EXCLUSIVE on sessions and events for a moment.

DROP INDEX sessions_open_by_expiry;
DROP INDEX sessions_open_idle;
DROP INDEX sessions_by_open_tenant;
DROP INDEX events_by_time;
