-- What: when a session was last used by a file call.
-- Why:  file calls keep a session from being idle, as runs do, and leave files that must not be lost unnoticed.
-- Lock: ACCESS EXCLUSIVE on sessions for a moment; a column without a default rewrites nothing.

ALTER TABLE sessions ADD COLUMN used_at timestamptz;
