-- Volumes of tenants: caches of cargo, pip, npm and the like outlive sessions and are shared by sessions of
-- one tenant.

CREATE TABLE volumes (
    id         uuid PRIMARY KEY,
    tenant_id  text NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    name       text NOT NULL CHECK (name ~ '^[a-z0-9-]{1,63}$'),
    -- The project whose sessions may mount it; null for all of the tenant.
    project    text CHECK (octet_length(project) BETWEEN 1 AND 255),
    max_bytes  bigint NOT NULL CHECK (max_bytes > 0),
    -- It is deleted when it was not used for this long.
    ttl        interval NOT NULL CHECK (ttl > interval '0'),
    -- The key that created it.
    key_id     uuid NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    used_at    timestamptz NOT NULL DEFAULT now(),
    -- What was measured last, on its root.
    used_bytes bigint NOT NULL DEFAULT 0 CHECK (used_bytes >= 0),
    -- The root that holds its directory; null until a run first used it.
    root_id    uuid,
    UNIQUE (tenant_id, name)
);
CREATE INDEX volumes_by_root ON volumes (root_id);

-- The sessions that mount them.
CREATE TABLE volume_mounts (
    volume_id  uuid NOT NULL REFERENCES volumes (id) ON DELETE CASCADE,
    session_id uuid NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    mode       text NOT NULL CHECK (mode IN ('read_only', 'copy', 'exclusive')),
    PRIMARY KEY (session_id, volume_id)
);
CREATE INDEX volume_mounts_by_volume ON volume_mounts (volume_id);
