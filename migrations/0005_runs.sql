-- Runs: those that have not ended in `live_runs`, so that what is on the path of a run stays small whatever
-- the history; the others in `ended_runs`, which is only inserted into and removed by day. Their ids begin
-- with the time at which they were made, and the partitions of a day are bounded by ids (0007_history.sql).

-- The least id that is made at this time: 48 bits of milliseconds, then zeros.
CREATE FUNCTION run_id_at(at timestamptz) RETURNS uuid LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT rpad(lpad(to_hex(floor(extract(epoch FROM at) * 1000)::bigint), 12, '0'), 32, '0')::uuid
$$;

-- The same, never null: of null and of times before 1970 the least id of all.
CREATE FUNCTION id_at(at timestamptz) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (lpad(to_hex(greatest(floor(extract(epoch FROM at) * 1000), 0)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

-- The day, in UTC, on which an id was made.
CREATE FUNCTION run_day(id uuid) RETURNS date LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
    SELECT (to_timestamp(('x' || translate(left(id::text, 13), '-', ''))::bit(48)::bigint / 1000.0) AT TIME ZONE 'UTC')::date
$$;

-- What runs have in common: mode, limits, policy and so on (docs/adr/0014-settings-of-runs.md). Most runs
-- of a session, and of a tenant, have equal settings; a row without them is a third of the size.
CREATE TABLE run_settings (
    -- SHA-256 of the settings as their writer serialized them.
    hash     bytea PRIMARY KEY CHECK (octet_length(hash) = 32),
    settings jsonb NOT NULL,
    -- Not before the day of any run that refers to it: such a run is in the partition of that day or a
    -- later one, is live, or is in the default partition.
    used_day date NOT NULL
);
CREATE INDEX run_settings_by_day ON run_settings (used_day);

-- Runs that have not ended. Every run is inserted here and deleted when it ends; few are updated. Vacuum as
-- soon as there is something to do, and never lock the table to shorten it.
CREATE TABLE live_runs (
    id                  uuid PRIMARY KEY,
    tenant_id           text NOT NULL,
    session_id          uuid NOT NULL,
    -- The command alone if settings_hash is set, else also the settings.
    spec                jsonb NOT NULL,
    settings_hash       bytea,
    -- What a list shows of a long spec. Null if it reads the spec.
    summary             jsonb,
    labels              jsonb NOT NULL,
    retries             integer NOT NULL CHECK (retries BETWEEN 0 AND 10),
    attempt             integer NOT NULL DEFAULT 1 CHECK (attempt BETWEEN 1 AND retries + 1),
    -- Counts the beginnings of the run: a hand-back that was given up and is executed late must not undo a
    -- later beginning.
    turn                integer NOT NULL DEFAULT 0 CHECK (turn >= 0),
    -- held: waits for an approval. queued: no worker may have begun it. running: the named worker may have.
    state               text NOT NULL CHECK (state IN ('held', 'queued', 'running')),
    -- The approval that a held run waits for.
    approval_id         uuid,
    -- The key that started the run, if the run may request approvals.
    requested_by        uuid,
    cancel_requested_at timestamptz,
    cancel_reason       text CHECK (octet_length(cancel_reason) BETWEEN 1 AND 1000),
    -- From SIGTERM to SIGKILL. Null takes the worker's setting.
    cancel_grace        interval CHECK (cancel_grace >= interval '0'),
    worker_id           text,
    incarnation         uuid,
    lease_epoch         bigint,
    created_at          timestamptz NOT NULL DEFAULT now(),
    -- How long it may wait for a worker.
    queue_timeout       interval CHECK (queue_timeout > interval '0'),
    -- When a queued run ends; a retry sets it again.
    queued_until        timestamptz,
    -- Encrypted variables. Never part of history.
    secret_env          bytea,
    -- The span of the call that started it, as a W3C traceparent. Null unless traces are exported.
    traceparent         text CHECK (length(traceparent) = 55),
    CHECK (cancel_requested_at IS NOT NULL OR cancel_grace IS NULL),
    CHECK ((state = 'held') = (approval_id IS NOT NULL)),
    CHECK (CASE WHEN state = 'running' THEN num_nonnulls(worker_id, incarnation, lease_epoch) = 3
                ELSE num_nonnulls(worker_id, incarnation, lease_epoch) = 0 END)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);
-- Encrypted data does not shrink.
ALTER TABLE live_runs ALTER COLUMN secret_env SET STORAGE EXTERNAL;
-- The id comes last in each: new entries are at the end of their part, next to each other.
CREATE INDEX live_runs_by_worker ON live_runs (worker_id, incarnation, id) WHERE worker_id IS NOT NULL;
CREATE INDEX live_runs_by_session ON live_runs (session_id, state, id);
CREATE INDEX live_runs_by_tenant ON live_runs (tenant_id, state, id);
CREATE INDEX live_runs_queued_by_deadline ON live_runs (queued_until) WHERE state = 'queued';
-- Whether a session has files is known without reading its queue.
CREATE INDEX live_runs_retried ON live_runs (session_id) WHERE attempt > 1;

-- History of runs. Only inserted into and read; removed by day.
CREATE TABLE ended_runs (
    id                  uuid PRIMARY KEY,
    tenant_id           text NOT NULL,
    session_id          uuid NOT NULL,
    -- As in live_runs, up to lease_epoch.
    spec                jsonb NOT NULL,
    settings_hash       bytea,
    summary             jsonb,
    labels              jsonb NOT NULL,
    attempt             integer NOT NULL CHECK (attempt > 0),
    cancel_requested_at timestamptz,
    cancel_reason       text,
    worker_id           text,
    incarnation         uuid,
    lease_epoch         bigint,
    created_at          timestamptz NOT NULL,
    -- Null if its command never started.
    started_at          timestamptz,
    ended_at            timestamptz NOT NULL,
    -- Stored output, as in the result.
    output_bytes        bigint NOT NULL DEFAULT 0 CHECK (output_bytes >= 0),
    -- The rest, as its worker reported it (crates/types/src/result.rs). Of a run that no worker finished it
    -- has little more than the outcome.
    result              jsonb NOT NULL CHECK (result #> '{outcome,kind}' IS NOT NULL),
    -- What a transactional run changed in its workspace, and whether that was applied, which may be decided
    -- after its end: a worker that finds prepared changes of a run applies them only if its row says so.
    changes             jsonb,
    CHECK ((result -> 'output_total')::bigint >= output_bytes),
    CHECK (jsonb_array_length(result #> '{violations,seen}') BETWEEN 1 AND 100)
) PARTITION BY RANGE (id);
CREATE INDEX ended_runs_by_tenant ON ended_runs (tenant_id, id);
CREATE INDEX ended_runs_by_session ON ended_runs (session_id, id);
-- For days without a partition, as after a jump of a clock.
CREATE TABLE ended_runs_default PARTITION OF ended_runs DEFAULT;

-- Idempotency keys of runs, unique across the days of history. A key is kept as long as its run, and may be
-- kept longer.
CREATE TABLE run_keys (
    session_id      uuid NOT NULL,
    idempotency_key text NOT NULL,
    run_id          uuid NOT NULL,
    request_hash    bytea NOT NULL,
    PRIMARY KEY (session_id, idempotency_key)
);
-- For their removal with the runs of a day.
CREATE INDEX run_keys_by_run ON run_keys (run_id);

-- One row for each label of a run, see label_tokens. In the order of ids, so that a list reads only its page.
CREATE TABLE run_labels (
    token  text NOT NULL,
    run_id uuid NOT NULL,
    PRIMARY KEY (token, run_id)
) PARTITION BY RANGE (run_id);
CREATE TABLE run_labels_default PARTITION OF run_labels DEFAULT;

-- Live and ended runs together, for reads of single runs and by hand.
CREATE VIEW runs AS
SELECT id, tenant_id, session_id,
       spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = settings_hash), '{}') AS spec,
       summary, labels, attempt, state, cancel_requested_at, cancel_reason, worker_id, incarnation, lease_epoch,
       created_at, NULL::timestamptz AS started_at, NULL::timestamptz AS ended_at, NULL::jsonb AS outcome,
       NULL::integer AS exit_code, 0::bigint AS output_bytes, NULL::jsonb AS result, NULL::jsonb AS changes, secret_env
FROM live_runs
UNION ALL
SELECT id, tenant_id, session_id,
       spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = settings_hash), '{}'),
       summary, labels, attempt, 'ended', cancel_requested_at, cancel_reason, worker_id, incarnation, lease_epoch,
       created_at, started_at, ended_at, result -> 'outcome',
       CASE result #>> '{outcome,kind}' WHEN 'exited' THEN (result #> '{outcome,detail}')::integer END,
       output_bytes, result, changes, NULL
FROM ended_runs;
