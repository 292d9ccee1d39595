-- The output of runs, and how much of it tenants store.

-- What runs wrote. A row has the bytes, or names an object outside the database that has them: large output
-- need not pass through the write-ahead log and the tables (docs/adr/0013-output-objects.md).
CREATE TABLE run_output (
    run_id        uuid NOT NULL,
    -- Where the bytes start in both streams taken together.
    position      bigint NOT NULL CHECK (position >= 0),
    stream        smallint NOT NULL CHECK (stream IN (1, 2)),
    -- Where they start within their stream.
    stream_offset bigint NOT NULL CHECK (stream_offset >= 0),
    data          bytea CHECK (octet_length(data) BETWEEN 1 AND 1048576),
    -- DAY/RUN_INCARNATION_POSITION_LENGTH, see store/src/objects/name.rs.
    object        text,
    -- Where the bytes start in the object, and how many they are.
    object_offset integer,
    length        integer,
    PRIMARY KEY (run_id, position),
    CONSTRAINT run_output_object_check CHECK (
        CASE WHEN data IS NULL THEN coalesce(object_offset >= 0 AND length BETWEEN 1 AND 1048576
                                             -- Only objects of its own run.
                                             AND left(split_part(object, '/', 2), 37) = run_id || '_', false)
             ELSE object IS NULL AND object_offset IS NULL AND length IS NULL END)
) PARTITION BY RANGE (run_id);
-- Compressing output on every flush would cost more than the space is worth.
ALTER TABLE run_output ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE run_output_default PARTITION OF run_output DEFAULT;

-- The store that has the objects of this database: one row.
CREATE TABLE output_store (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    -- In an object there, too.
    id       uuid NOT NULL DEFAULT gen_random_uuid(),
    -- Where it was when it was first used; null before.
    location text
);
INSERT INTO output_store DEFAULT VALUES;

-- Objects whose rows are deleted. A transaction that deletes rows inserts here; upkeep removes the objects,
-- then these.
CREATE TABLE output_removals (
    object text PRIMARY KEY
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- How far the output of a tenant is deleted that keeps its runs for longer.
CREATE TABLE output_purges (
    tenant_id text PRIMARY KEY REFERENCES tenants (id) ON DELETE CASCADE,
    -- The output of runs up to this id is deleted,
    done      uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    -- except that of these, which had not ended for long enough.
    late      uuid[] NOT NULL DEFAULT '{}'
);

-- Bytes of output that a tenant stores, by the day of the run.
CREATE TABLE tenant_output (
    tenant_id text NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    day       date NOT NULL,
    bytes     bigint NOT NULL,
    PRIMARY KEY (tenant_id, day)
) WITH (fillfactor = 50);

-- Changes that are not in tenant_output yet. Append-only: a sum in one row, updated by every commit, would
-- be one long chain of versions while an old snapshot is open.
CREATE TABLE output_changes (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id text NOT NULL,
    day       date NOT NULL,
    bytes     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- Where to look for changes: one row. All up to `after` are done, up to `next` they were when it was set,
-- except those of transactions that were in progress.
CREATE TABLE output_fold (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    after    bigint NOT NULL DEFAULT 0,
    next     bigint NOT NULL DEFAULT 0,
    set_at   timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 20);
INSERT INTO output_fold DEFAULT VALUES;

-- Queues a run again whose command its worker ended, if its caller allowed another attempt and the worker
-- holds the lease under which it runs. Returns whether it did. Only live runs have output that it deletes,
-- which the role of workers may not do in general.
CREATE FUNCTION retry_run(run uuid, holder text, holder_incarnation uuid, epoch bigint) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    -- The end of the session and a change of its lease wait until this run is visible as queued.
    PERFORM 1 FROM live_runs r JOIN sessions s ON s.id = r.session_id WHERE r.id = run FOR SHARE OF s;
    UPDATE live_runs r SET state = 'queued', attempt = r.attempt + 1, queued_until = now() + r.queue_timeout,
                           worker_id = NULL, incarnation = NULL, lease_epoch = NULL
    FROM sessions s, workers w
    WHERE r.id = run AND r.state = 'running' AND r.attempt <= r.retries AND r.cancel_requested_at IS NULL
      AND r.worker_id = holder AND r.incarnation = holder_incarnation AND r.lease_epoch = epoch
      AND s.id = r.session_id AND s.state = 'open'
      AND s.lease_worker || '' = holder AND s.lease_incarnation = holder_incarnation AND s.lease_epoch = epoch
      AND w.id = holder AND w.incarnation = holder_incarnation AND w.lease_until > now();
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    WITH deleted AS (
        DELETE FROM run_output WHERE run_id = run RETURNING object
    )
    INSERT INTO output_removals SELECT DISTINCT object FROM deleted WHERE object IS NOT NULL ON CONFLICT DO NOTHING;
    RETURN true;
END $$;
