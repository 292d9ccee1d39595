-- What: a session may end because its files are gone.
-- Why:  a caller that goes on in an empty directory would not know what it lost.
-- Lock: ACCESS EXCLUSIVE on sessions while the rows are checked.

ALTER TABLE sessions DROP CONSTRAINT sessions_end_reason_check;
ALTER TABLE sessions ADD CONSTRAINT sessions_end_reason_check
    CHECK (end_reason IN ('closed', 'expired', 'idle', 'data_lost'));
