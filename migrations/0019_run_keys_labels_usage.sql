-- What: idempotency keys, labels and stored output of runs in tables of their own, filled from `runs`; the constraints
--       that let 0020 make `runs` and `run_output` partitions without reading them.
-- Why:  history is partitioned by time (0020): a key must be unique across partitions, a list by label must be able to
--       stop after one page, and the output of a tenant must be known without reading its runs.
-- Lock: ACCESS EXCLUSIVE on runs and run_output, and SHARE ROW EXCLUSIVE on tenants, for a moment at the end; the
--       copies before it only read. Stop or restart the service for 0019 and 0020 together: earlier programs cannot
--       use the tables of 0020.

-- The least id of a run that was made at this time: 48 bits of milliseconds, then zeros.
CREATE FUNCTION run_id_at(at timestamptz) RETURNS uuid LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT rpad(lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0'), 32, '0')::uuid
$$;

-- The day, in UTC, on which the id of a run was made.
CREATE FUNCTION run_day(id uuid) RETURNS date LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (to_timestamp(('x' || translate(left(id::text, 13), '-', ''))::bit(48)::bigint / 1000.0) AT TIME ZONE 'UTC')::date
$$;

-- The first day whose runs have partitions of their own. Runs of earlier versions are in the partitions `_before`. Two
-- days more than needed, for runs that are inserted until 0020.
DO $$
DECLARE
    last uuid := (SELECT id FROM runs ORDER BY id DESC LIMIT 1);
    today date := (now() AT TIME ZONE 'UTC')::date;
BEGIN
    EXECUTE format('CREATE FUNCTION first_run_partition() RETURNS date LANGUAGE sql IMMUTABLE AS %L',
                   format('SELECT date %L', CASE WHEN last IS NULL THEN today ELSE greatest(today, run_day(last)) + 2 END));
END $$;

-- A key is kept as long as its run, and may be kept longer.
CREATE TABLE run_keys (
    session_id      uuid NOT NULL,
    idempotency_key text NOT NULL,
    run_id          uuid NOT NULL,
    request_hash    bytea NOT NULL,
    PRIMARY KEY (session_id, idempotency_key)
);

INSERT INTO run_keys (session_id, idempotency_key, run_id, request_hash)
SELECT session_id, idempotency_key, id, request_hash FROM runs WHERE idempotency_key IS NOT NULL;

-- For their removal with the runs of a day.
CREATE INDEX run_keys_by_run ON run_keys (run_id);

-- One row for each label of a run, see label_tokens. In the order of ids, so that a list reads only its page.
CREATE TABLE run_labels (
    token  text NOT NULL,
    run_id uuid NOT NULL,
    PRIMARY KEY (token, run_id)
) PARTITION BY RANGE (run_id);

DO $$
BEGIN
    EXECUTE format('CREATE TABLE run_labels_before PARTITION OF run_labels FOR VALUES FROM (MINVALUE) TO (%L)',
                   run_id_at(first_run_partition()::timestamp AT TIME ZONE 'UTC'));
END $$;
-- For days without a partition, as after a jump of a clock.
CREATE TABLE run_labels_default PARTITION OF run_labels DEFAULT;

INSERT INTO run_labels (token, run_id)
SELECT unnest(label_tokens(tenant_id, labels)), id FROM runs WHERE labels <> '{}';

-- Output that a tenant stores, by the day of the run.
CREATE TABLE tenant_output (
    tenant_id text NOT NULL,
    day       date NOT NULL,
    bytes     bigint NOT NULL,
    PRIMARY KEY (tenant_id, day)
) WITH (fillfactor = 50);

-- Changes that are not in tenant_output yet. Append-only: a sum in one row, updated by every commit, would be one long
-- chain of versions while an old snapshot is open.
CREATE TABLE output_changes (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant_id text NOT NULL,
    day       date NOT NULL,
    bytes     bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- Where to look for changes: all up to `after` are done, up to `next` they were when it was set, except those of
-- transactions that were in progress.
CREATE TABLE output_fold (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    after    bigint NOT NULL DEFAULT 0,
    next     bigint NOT NULL DEFAULT 0,
    set_at   timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 20);
INSERT INTO output_fold DEFAULT VALUES;

-- Output of runs that end between this statement and 0020 is not counted.
INSERT INTO tenant_output (tenant_id, day, bytes)
SELECT tenant_id, run_day(id), sum(output_bytes) FROM runs WHERE output_bytes > 0 AND state = 'ended' GROUP BY 1, 2;

DO $$
DECLARE
    bound uuid := run_id_at(first_run_partition()::timestamp AT TIME ZONE 'UTC');
BEGIN
    EXECUTE format('ALTER TABLE run_output ADD CONSTRAINT run_output_before CHECK (run_id < %L) NOT VALID', bound);
    EXECUTE format('ALTER TABLE runs ADD CONSTRAINT ended_runs_before CHECK (id < %L) NOT VALID', bound);
END $$;

-- Last, because it keeps others from changing tenants.
ALTER TABLE tenant_output ADD FOREIGN KEY (tenant_id) REFERENCES tenants (id) ON DELETE CASCADE;
