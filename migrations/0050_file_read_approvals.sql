-- What: the file that an approval is about, and which files its decision holds for.
-- Why:  in filesystem.mode dynamic a read of a file of the host waits for a person's decision.
-- Lock: ACCESS EXCLUSIVE on approvals while its indexes on what is requested are made again; the table is small.

ALTER TABLE approvals
    -- Empty if the kind has none. Bounded, because indexes have it.
    ADD COLUMN path text NOT NULL DEFAULT '' CHECK (octet_length(path) <= 1024),
    -- The file, or all files below its directory. Null unless it is decided and has a path.
    ADD COLUMN reach text CHECK (reach IN ('file', 'directory')),
    ADD CONSTRAINT approvals_decided_reach_check CHECK (reach IS NULL OR (path <> '' AND state IN ('allowed', 'denied')));

DROP INDEX approvals_by_run;
CREATE INDEX approvals_by_run ON approvals (run_id, kind, host, port, path, id);
DROP INDEX approvals_pending_of_run;
CREATE UNIQUE INDEX approvals_pending_of_run ON approvals (run_id, kind, host, port, path) WHERE state = 'pending';
DROP INDEX approvals_granted;
CREATE INDEX approvals_granted ON approvals (tenant_id, kind, host, port, path)
    WHERE state = 'allowed' AND scope <> 'once' AND revoked_at IS NULL;
