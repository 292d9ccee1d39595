-- Tenants: who they are, what they may use, and the keys that their callers use.

-- An organisation. Everything that callers own belongs to one.
CREATE TABLE tenants (
    id                        text PRIMARY KEY CHECK (id ~ '^[a-z0-9-]{1,63}$'),
    created_at                timestamptz NOT NULL DEFAULT now(),

    quota_sessions            bigint NOT NULL CHECK (quota_sessions > 0),
    quota_concurrent_runs     bigint NOT NULL CHECK (quota_concurrent_runs > 0),
    quota_queued_runs         bigint NOT NULL CHECK (quota_queued_runs > 0),
    quota_requests_per_second bigint NOT NULL CHECK (quota_requests_per_second > 0),
    quota_output_bytes        bigint NOT NULL CHECK (quota_output_bytes > 0),
    quota_disk_bytes          bigint NOT NULL DEFAULT 107374182400 CHECK (quota_disk_bytes > 0),
    -- The highest limits of its runs. Only what differs from the installation, as in `LimitsRequest`.
    max_limits                jsonb NOT NULL DEFAULT '{}',

    -- The least isolation that its sessions and runs have. Only an administrator lowers it, and says why.
    isolation_floor           text NOT NULL DEFAULT 'LEVEL_2'
        CHECK (isolation_floor IN ('LEVEL_0', 'LEVEL_1', 'LEVEL_2')),
    floor_reason              text CHECK (length(floor_reason) BETWEEN 1 AND 1000),
    -- The key that decided; none for what the installation does for itself.
    floor_key                 uuid,
    floor_set_at              timestamptz,
    -- The lowest isolation that its runs may request with an approval. Null permits nothing.
    isolation_ask_floor       text CHECK (isolation_ask_floor IN ('LEVEL_0', 'LEVEL_1', 'LEVEL_2')),

    suspended_at              timestamptz,
    suspend_reason            text CHECK (octet_length(suspend_reason) BETWEEN 1 AND 1000),
    -- Its rows are deleted once its sandboxes and directories are gone. A deleted tenant is suspended.
    deleted_at                timestamptz,

    -- How long its rows are kept. Null takes the installation's setting.
    retention_runs            interval CHECK (retention_runs > interval '0'),
    retention_output          interval CHECK (retention_output > interval '0'),
    retention_audit           interval CHECK (retention_audit > interval '0'),

    -- Raised by every change of a tool. It is read with the key of each call, so that copies of tools
    -- are never older.
    tools_version             bigint NOT NULL DEFAULT 0,

    CHECK ((floor_reason IS NULL) = (floor_set_at IS NULL)),
    CHECK (isolation_floor = 'LEVEL_2' OR floor_reason IS NOT NULL),
    CHECK ((suspended_at IS NULL) = (suspend_reason IS NULL)),
    CHECK (deleted_at IS NULL OR suspended_at IS NOT NULL)
);
CREATE INDEX tenants_suspended ON tenants (id) WHERE suspended_at IS NOT NULL;

-- Returns the lowest isolation that a tenant permits: its floor, or what its runs may ask for if that is
-- lower. Null if there is no such tenant. A worker checks it before it starts a run that waited; its role
-- may not read tenants.
CREATE FUNCTION lowest_isolation(tenant text) RETURNS text LANGUAGE sql STABLE AS $$
    -- The words for levels sort by level.
    SELECT least(isolation_floor, isolation_ask_floor) FROM tenants WHERE id = tenant
$$;

-- Keys of callers.
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
    revoked_at   timestamptz,
    -- The key is refused from this time on. Null never expires.
    expires_at   timestamptz,
    -- Written at most once a minute.
    last_used_at timestamptz
);
CREATE INDEX api_keys_by_tenant ON api_keys (tenant_id, id);
