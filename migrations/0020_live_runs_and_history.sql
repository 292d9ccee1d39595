-- What: `live_runs`, the runs that have not ended; `ended_runs` and `run_output`, partitioned by the day of the run's
--       id; `waiting_sessions`; a view `runs` of both. The old tables become the partitions `_before`.
-- Why:  what is on the path of a run stays small whatever the history, ended rows are never updated, and a day of
--       history is removed by DROP TABLE.
-- Lock: SHARE UPDATE EXCLUSIVE on runs and run_output while their rows are checked, then ACCESS EXCLUSIVE for a moment:
--       nothing after LOCK TABLE reads or writes more than the runs that have not ended and those of the last minute.
--       Stop or restart the service, see 0019.

ALTER TABLE runs VALIDATE CONSTRAINT ended_runs_before;
ALTER TABLE run_output VALIDATE CONSTRAINT run_output_before;

-- What was inserted since 0019, and what is inserted while this is copied.
CREATE FUNCTION pg_temp.copy_new(since timestamptz) RETURNS void LANGUAGE sql AS $$
    INSERT INTO run_keys (session_id, idempotency_key, run_id, request_hash)
    SELECT session_id, idempotency_key, id, request_hash FROM runs
    WHERE id >= run_id_at(since) AND idempotency_key IS NOT NULL
    ON CONFLICT DO NOTHING;
    INSERT INTO run_labels (token, run_id)
    SELECT unnest(label_tokens(tenant_id, labels)), id FROM runs WHERE id >= run_id_at(since) AND labels <> '{}'
    ON CONFLICT DO NOTHING;
$$;
SELECT pg_temp.copy_new(now() - interval '1 hour');
-- Every run is inserted here and deleted when it ends; few are updated. Vacuum as soon as there is something to do, and
-- never lock the table to shorten it.
CREATE TABLE live_runs (
    id                  uuid PRIMARY KEY,
    tenant_id           text NOT NULL,
    session_id          uuid NOT NULL,
    spec                jsonb NOT NULL,
    summary             jsonb,
    labels              jsonb NOT NULL,
    retries             integer NOT NULL CHECK (retries BETWEEN 0 AND 10),
    attempt             integer NOT NULL DEFAULT 1 CHECK (attempt BETWEEN 1 AND retries + 1),
    turn                integer NOT NULL DEFAULT 0 CHECK (turn >= 0),
    -- queued: no worker may have begun it. running: the named worker may have.
    state               text NOT NULL CHECK (state IN ('queued', 'running')),
    cancel_requested_at timestamptz,
    cancel_reason       text CHECK (octet_length(cancel_reason) BETWEEN 1 AND 1000),
    -- From SIGTERM to SIGKILL. Null takes the worker's setting.
    cancel_grace        interval CHECK (cancel_grace >= interval '0'),
    worker_id           text,
    incarnation         uuid,
    lease_epoch         bigint,
    created_at          timestamptz NOT NULL DEFAULT now(),
    -- Null for runs of earlier versions, which wait indefinitely.
    queue_timeout       interval CHECK (queue_timeout > interval '0'),
    -- When a queued run ends; a retry sets it again.
    queued_until        timestamptz,
    -- Encrypted. Never part of history.
    secret_env          bytea,
    CHECK (state <> 'queued' OR (worker_id IS NULL AND incarnation IS NULL AND lease_epoch IS NULL)),
    CHECK (state <> 'running' OR (worker_id IS NOT NULL AND incarnation IS NOT NULL AND lease_epoch IS NOT NULL)),
    CHECK (cancel_requested_at IS NOT NULL OR cancel_grace IS NULL)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);
ALTER TABLE live_runs ALTER COLUMN secret_env SET STORAGE EXTERNAL;

-- The id comes last in each: new entries are at the end of their part, next to each other.
CREATE INDEX live_runs_by_worker ON live_runs (worker_id, incarnation, id) WHERE worker_id IS NOT NULL;
CREATE INDEX live_runs_by_session ON live_runs (session_id, state, id);
CREATE INDEX live_runs_by_tenant ON live_runs (tenant_id, state, id);
CREATE INDEX live_runs_queued_by_deadline ON live_runs (queued_until) WHERE state = 'queued';

-- Sessions that have queued runs and no live holder; rows that are outdated may be left over. A row is written and
-- deleted only by transactions that have locked the session's row.
CREATE TABLE waiting_sessions (
    session_id      uuid PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    tenant_id       text NOT NULL,
    mode            text NOT NULL,
    -- The root that has its files; zero if any worker may take it.
    root            uuid NOT NULL,
    allow_data_loss boolean NOT NULL,
    since           timestamptz NOT NULL DEFAULT now(),
    -- Tenants in an order in which each is as likely as another to be next after a random number.
    tenant_hash     integer NOT NULL GENERATED ALWAYS AS (hashtext(tenant_id)) STORED
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);
CREATE INDEX waiting_sessions_by_worker ON waiting_sessions (root, mode, tenant_hash, tenant_id, since, session_id);
CREATE INDEX waiting_sessions_by_root ON waiting_sessions (root) WHERE allow_data_loss;

-- History. Only inserted into, and read; removed by day.
CREATE TABLE ended_runs (
    id                  uuid PRIMARY KEY,
    tenant_id           text NOT NULL,
    session_id          uuid NOT NULL,
    spec                jsonb NOT NULL,
    -- Null for runs of earlier versions.
    summary             jsonb,
    labels              jsonb NOT NULL,
    attempt             integer NOT NULL,
    cancel_requested_at timestamptz,
    cancel_reason       text,
    worker_id           text,
    incarnation         uuid,
    lease_epoch         bigint,
    sandbox_root        text,
    created_at          timestamptz NOT NULL,
    started_at          timestamptz,
    -- Not null in the partitions of days, as the outcome.
    ended_at            timestamptz,
    setup_micros        bigint,
    prepared            boolean,
    unenforced          text[],
    -- Null for runs of earlier versions.
    watched             text[],
    outcome             jsonb,
    exit_code           integer,
    usage               jsonb,
    receipt             jsonb,
    output_bytes        bigint NOT NULL DEFAULT 0,
    output_truncated    boolean NOT NULL DEFAULT false,
    -- Null for runs that were lost or are of earlier versions.
    output_total        bigint,
    violations          jsonb
) PARTITION BY RANGE (id);
CREATE INDEX ended_runs_by_tenant ON ended_runs (tenant_id, id);
CREATE INDEX ended_runs_by_session ON ended_runs (session_id, id);

LOCK TABLE run_output, runs IN ACCESS EXCLUSIVE MODE;
SELECT pg_temp.copy_new(clock_timestamp() - interval '1 minute');

INSERT INTO live_runs (id, tenant_id, session_id, spec, summary, labels, retries, attempt, turn, state,
                       cancel_requested_at, cancel_reason, cancel_grace, worker_id, incarnation, lease_epoch,
                       created_at, queue_timeout, queued_until, secret_env)
SELECT id, tenant_id, session_id, spec, summary, labels, retries, attempt, turn, state,
       cancel_requested_at, cancel_reason, cancel_grace, worker_id, incarnation, lease_epoch,
       created_at, queue_timeout, queued_until, secret_env
FROM runs WHERE active_tenant IS NOT NULL;

INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
SELECT s.id, s.tenant_id, s.spec ->> 'mode', coalesce(s.home_root, '00000000-0000-0000-0000-000000000000'), s.allow_data_loss
FROM sessions s
WHERE s.id IN (SELECT session_id FROM live_runs WHERE state = 'queued') AND s.state = 'open';

-- The old table. Dropped columns and constraints rewrite nothing.
ALTER TABLE run_output DROP CONSTRAINT run_output_run_id_fkey;
DELETE FROM runs WHERE active_tenant IS NOT NULL;
DROP INDEX runs_by_active_tenant, runs_active_by_worker, runs_queued_by_session, runs_queued_by_deadline, runs_with_output,
           runs_by_label, runs_by_idempotency_key;
ALTER TABLE runs
    DROP CONSTRAINT runs_session_id_tenant_id_fkey,
    DROP COLUMN active_tenant, DROP COLUMN state, DROP COLUMN secret_env, DROP COLUMN retries, DROP COLUMN turn,
    DROP COLUMN queue_timeout, DROP COLUMN queued_until, DROP COLUMN cancel_grace,
    DROP COLUMN idempotency_key, DROP COLUMN request_hash;
ALTER TABLE runs RENAME TO ended_runs_before;
ALTER TABLE run_output RENAME TO run_output_before;
ALTER INDEX runs_pkey RENAME TO ended_runs_before_pkey;
ALTER INDEX runs_by_tenant RENAME TO ended_runs_before_by_tenant;
ALTER INDEX runs_by_session RENAME TO ended_runs_before_by_session;
ALTER INDEX run_output_pkey RENAME TO run_output_before_pkey;

CREATE TABLE run_output (
    run_id        uuid NOT NULL,
    -- Where the bytes start in both streams taken together.
    position      bigint NOT NULL,
    stream        smallint NOT NULL,
    -- Where they start within their stream.
    stream_offset bigint NOT NULL,
    data          bytea NOT NULL,
    PRIMARY KEY (run_id, position),
    CONSTRAINT run_output_position_check CHECK (position >= 0),
    CONSTRAINT run_output_stream_check CHECK (stream IN (1, 2)),
    CONSTRAINT run_output_stream_offset_check CHECK (stream_offset >= 0),
    CONSTRAINT run_output_data_check CHECK (octet_length(data) BETWEEN 1 AND 1048576)
) PARTITION BY RANGE (run_id);
-- Compressing output on every flush would cost more than the space is worth.
ALTER TABLE run_output ALTER COLUMN data SET STORAGE EXTERNAL;

DO $$
DECLARE
    bound uuid := run_id_at(first_run_partition()::timestamp AT TIME ZONE 'UTC');
BEGIN
    EXECUTE format('ALTER TABLE ended_runs ATTACH PARTITION ended_runs_before FOR VALUES FROM (MINVALUE) TO (%L)', bound);
    EXECUTE format('ALTER TABLE run_output ATTACH PARTITION run_output_before FOR VALUES FROM (MINVALUE) TO (%L)', bound);
END $$;
-- For days without a partition, as after a jump of a clock.
CREATE TABLE ended_runs_default PARTITION OF ended_runs DEFAULT;
CREATE TABLE run_output_default PARTITION OF run_output DEFAULT;

-- Makes the partitions of a day, named after it: ended_runs_20300131, run_output_20300131 and run_labels_20300131.
-- Repeating it changes nothing. Rows of that day in the default partitions move to the new ones. Fails after a second
-- without the locks; call it again then.
CREATE FUNCTION create_run_partitions(day date) RETURNS void LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    lower uuid := run_id_at(day::timestamp AT TIME ZONE 'UTC');
    upper uuid := run_id_at((day + 1)::timestamp AT TIME ZONE 'UTC');
    parent text;
    part text;
    key text;
BEGIN
    IF day < first_run_partition() THEN
        RETURN;
    END IF;
    FOREACH parent IN ARRAY ARRAY['ended_runs', 'run_output', 'run_labels'] LOOP
        part := parent || to_char(day, '_YYYYMMDD');
        key := CASE parent WHEN 'ended_runs' THEN 'id' ELSE 'run_id' END;
        CONTINUE WHEN to_regclass(part) IS NOT NULL;
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING STORAGE)', part, parent);
        IF parent = 'ended_runs' THEN
            EXECUTE format('ALTER TABLE %I ALTER ended_at SET NOT NULL, ALTER outcome SET NOT NULL,
                            ADD CHECK (attempt > 0), ADD CHECK (output_bytes >= 0), ADD CHECK (output_total >= output_bytes),
                            ADD CHECK (jsonb_array_length(violations -> ''seen'') BETWEEN 1 AND 100)', part);
        END IF;
        -- Nothing is inserted into the default partition from here on.
        EXECUTE format('LOCK TABLE %I IN ACCESS EXCLUSIVE MODE', parent || '_default');
        EXECUTE format('WITH moved AS (DELETE FROM %I WHERE %I >= %L AND %I < %L RETURNING *) INSERT INTO %I SELECT * FROM moved',
                       parent || '_default', key, lower, key, upper, part);
        EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', parent, part, lower, upper);
    END LOOP;
END $$;

-- Upkeep makes those of later days.
SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date + days) FROM generate_series(0, 2) AS days;

-- Both, for reads of single runs and by hand.
CREATE VIEW runs AS
SELECT id, tenant_id, session_id, spec, summary, labels, attempt, state, cancel_requested_at, cancel_reason,
       worker_id, incarnation, lease_epoch, NULL::text AS sandbox_root, created_at, NULL::timestamptz AS started_at,
       NULL::timestamptz AS ended_at, NULL::bigint AS setup_micros, NULL::boolean AS prepared,
       NULL::text[] AS unenforced, NULL::text[] AS watched, NULL::jsonb AS outcome, NULL::integer AS exit_code,
       NULL::jsonb AS usage, NULL::jsonb AS receipt, 0::bigint AS output_bytes, false AS output_truncated,
       NULL::bigint AS output_total, NULL::jsonb AS violations, secret_env
FROM live_runs
UNION ALL
SELECT id, tenant_id, session_id, spec, summary, labels, attempt, 'ended', cancel_requested_at, cancel_reason,
       worker_id, incarnation, lease_epoch, sandbox_root, created_at, started_at,
       ended_at, setup_micros, prepared,
       unenforced, watched, outcome, exit_code,
       usage, receipt, output_bytes, output_truncated,
       output_total, violations, NULL
FROM ended_runs;
