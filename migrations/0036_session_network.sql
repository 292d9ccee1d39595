-- What: the lists of hosts and ports of a session that were changed after it was created.
-- Why:  what a session's runs may reach changes while they run. The rest of a session's settings never changes, and
--       processes keep copies of it.
-- Lock: ACCESS EXCLUSIVE on sessions for a moment. Nothing is read or rewritten: the new column is null.

ALTER TABLE sessions ADD COLUMN network jsonb;
