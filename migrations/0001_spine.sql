-- What: tenants, keys, workers, sessions with their leases, runs and their output.
-- Why:  Postgres is the only truth; impossible rows are made impossible here.
-- Lock: none that matters; every table is new.

CREATE TABLE tenants (
    id                        text PRIMARY KEY CHECK (id ~ '^[a-z0-9-]{1,63}$'),
    created_at                timestamptz NOT NULL DEFAULT now(),
    quota_sessions            bigint NOT NULL CHECK (quota_sessions > 0),
    quota_concurrent_runs     bigint NOT NULL CHECK (quota_concurrent_runs > 0),
    quota_queued_runs         bigint NOT NULL CHECK (quota_queued_runs > 0),
    quota_requests_per_second bigint NOT NULL CHECK (quota_requests_per_second > 0),
    quota_output_bytes        bigint NOT NULL CHECK (quota_output_bytes > 0)
);

CREATE TABLE api_keys (
    id           uuid PRIMARY KEY,
    tenant_id    text NOT NULL REFERENCES tenants (id),
    display_name text NOT NULL,
    -- SHA-256 of the secret; the secret itself has 256 random bits and is stored nowhere.
    secret_hash  bytea NOT NULL UNIQUE CHECK (octet_length(secret_hash) = 32),
    scopes       text[] NOT NULL CHECK (
        cardinality(scopes) > 0
        AND scopes <@ ARRAY['run', 'files', 'approve', 'audit', 'admin', 'operator']
    ),
    created_at   timestamptz NOT NULL DEFAULT now(),
    revoked_at   timestamptz
);

CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id, id);

-- One row for each worker; all its session leases live as long as lease_until does.
CREATE TABLE workers (
    id            text PRIMARY KEY CHECK (id ~ '^[a-z0-9-]{1,63}$'),
    -- One life of the process; a new one fences the old.
    incarnation   uuid NOT NULL,
    -- Names the directory tree that holds its sessions; workers on a shared root have the same.
    root_id       uuid NOT NULL,
    address       text NOT NULL,
    modes         text[] NOT NULL CHECK (cardinality(modes) > 0),
    slots         integer NOT NULL CHECK (slots > 0),
    busy_slots    integer NOT NULL DEFAULT 0 CHECK (busy_slots >= 0),
    version       text NOT NULL,
    state         text NOT NULL CHECK (state IN ('ready', 'draining', 'left')),
    registered_at timestamptz NOT NULL DEFAULT now(),
    heartbeat_at  timestamptz NOT NULL DEFAULT now(),
    lease_until   timestamptz NOT NULL
);

CREATE TABLE sessions (
    id                uuid PRIMARY KEY,
    tenant_id         text NOT NULL REFERENCES tenants (id),
    alias             text CHECK (alias ~ '^[a-z0-9-]{1,63}$'),
    spec              jsonb NOT NULL,
    labels            jsonb NOT NULL,
    idempotency_key   text,
    request_hash      bytea,
    state             text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'ended')),
    end_reason        text CHECK (end_reason IN ('closed', 'expired', 'idle')),
    created_at        timestamptz NOT NULL DEFAULT now(),
    expires_at        timestamptz NOT NULL,
    idle_ttl          interval CHECK (idle_ttl > interval '0'),
    ended_at          timestamptz,
    -- When its directory was seen to be gone.
    removed_at        timestamptz,
    lease_worker      text REFERENCES workers (id),
    lease_incarnation uuid,
    lease_epoch       bigint NOT NULL DEFAULT 0 CHECK (lease_epoch >= 0),
    -- The root that holds its files; null until a worker first took it.
    home_root         uuid,
    UNIQUE (id, tenant_id),
    CHECK ((state = 'ended') = (ended_at IS NOT NULL)),
    CHECK ((state = 'ended') = (end_reason IS NOT NULL)),
    CHECK ((lease_worker IS NULL) = (lease_incarnation IS NULL)),
    CHECK (lease_worker IS NULL OR home_root IS NOT NULL),
    CHECK (removed_at IS NULL OR (state = 'ended' AND lease_worker IS NULL)),
    CHECK ((idempotency_key IS NULL) = (request_hash IS NULL))
);

CREATE UNIQUE INDEX sessions_by_alias ON sessions (tenant_id, alias) WHERE state = 'open';
CREATE UNIQUE INDEX sessions_by_idempotency_key ON sessions (tenant_id, idempotency_key);
CREATE INDEX sessions_by_tenant ON sessions (tenant_id, id);
CREATE INDEX sessions_open_by_tenant ON sessions (tenant_id) WHERE state = 'open';
CREATE INDEX sessions_open_by_expiry ON sessions (expires_at) WHERE state = 'open';
CREATE INDEX sessions_open_idle ON sessions (id) WHERE state = 'open' AND idle_ttl IS NOT NULL;
CREATE INDEX sessions_by_lease ON sessions (lease_worker) WHERE lease_worker IS NOT NULL;
CREATE INDEX sessions_to_remove ON sessions (home_root) WHERE state = 'ended' AND removed_at IS NULL;

CREATE TABLE runs (
    id                  uuid PRIMARY KEY,
    tenant_id           text NOT NULL,
    session_id          uuid NOT NULL,
    spec                jsonb NOT NULL,
    labels              jsonb NOT NULL,
    idempotency_key     text,
    request_hash        bytea,
    retries             integer NOT NULL CHECK (retries BETWEEN 0 AND 10),
    attempt             integer NOT NULL DEFAULT 1 CHECK (attempt BETWEEN 1 AND retries + 1),
    -- queued: no worker may have begun it. running: the named worker may have.
    state               text NOT NULL CHECK (state IN ('queued', 'running', 'ended')),
    cancel_requested_at timestamptz,
    worker_id           text,
    incarnation         uuid,
    lease_epoch         bigint,
    sandbox_root        text,
    created_at          timestamptz NOT NULL DEFAULT now(),
    started_at          timestamptz,
    ended_at            timestamptz,
    setup_micros        bigint CHECK (setup_micros >= 0),
    prepared            boolean,
    unenforced          text[],
    outcome             jsonb,
    exit_code           integer,
    usage               jsonb,
    receipt             jsonb,
    output_bytes        bigint NOT NULL DEFAULT 0 CHECK (output_bytes >= 0),
    output_truncated    boolean NOT NULL DEFAULT false,
    FOREIGN KEY (session_id, tenant_id) REFERENCES sessions (id, tenant_id),
    CHECK ((state = 'ended') = (outcome IS NOT NULL)),
    CHECK ((state = 'ended') = (ended_at IS NOT NULL)),
    CHECK (state <> 'queued' OR (worker_id IS NULL AND incarnation IS NULL AND lease_epoch IS NULL)),
    CHECK (state <> 'running' OR (worker_id IS NOT NULL AND incarnation IS NOT NULL AND lease_epoch IS NOT NULL)),
    CHECK ((idempotency_key IS NULL) = (request_hash IS NULL))
) WITH (fillfactor = 80); -- room for the commit to stay on its page

CREATE UNIQUE INDEX runs_by_idempotency_key ON runs (session_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX runs_by_tenant ON runs (tenant_id, id);
CREATE INDEX runs_by_session ON runs (session_id, id);
CREATE INDEX runs_active_by_tenant ON runs (tenant_id, state) WHERE state <> 'ended';
CREATE INDEX runs_active_by_worker ON runs (worker_id) WHERE state = 'running';
CREATE INDEX runs_queued_by_session ON runs (session_id) WHERE state = 'queued';
CREATE INDEX runs_with_output ON runs (tenant_id) INCLUDE (output_bytes) WHERE output_bytes > 0;

CREATE TABLE run_output (
    run_id        uuid NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    -- Where the bytes start in both streams taken together.
    position      bigint NOT NULL CHECK (position >= 0),
    stream        smallint NOT NULL CHECK (stream IN (1, 2)),
    -- Where they start within their stream.
    stream_offset bigint NOT NULL CHECK (stream_offset >= 0),
    data          bytea NOT NULL CHECK (octet_length(data) BETWEEN 1 AND 1048576),
    PRIMARY KEY (run_id, position)
);

-- Compressing output on every flush would cost more than the space is worth.
ALTER TABLE run_output ALTER COLUMN data SET STORAGE EXTERNAL;
