-- What: which session holds changes of a transactional run that wait for a decision, and until when.
-- Why:  the holder of the session finds them, refuses what would change the files below them, and drops them in time.
-- Lock: a new table, nothing else.

CREATE TABLE held_changes (
    -- One run for each session: its changes are files on the disk of the worker.
    session_id  uuid PRIMARY KEY,
    run_id      uuid NOT NULL,
    -- The lease under which the run was executed. It names the directory of the changes.
    lease_epoch bigint NOT NULL,
    -- The directory tree that has them.
    root        uuid NOT NULL,
    expires_at  timestamptz NOT NULL
);
CREATE INDEX held_changes_by_expiry ON held_changes (root, expires_at);
