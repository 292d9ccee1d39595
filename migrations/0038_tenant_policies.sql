-- What: policies of tenants, between that of the installation and those of sessions; each change is a new version.
-- Why:  operators restrict one tenant, and see who restricted it, when and why.
-- Lock: SHARE ROW EXCLUSIVE on tenants for a moment, for the reference; a new table.

CREATE TABLE tenant_policies (
    tenant_id  text NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    -- From 1. The highest one is in effect. Rows never change.
    version    bigint NOT NULL CHECK (version > 0),
    -- Null if the tenant has no policy from this version on.
    policy     jsonb,
    key_id     uuid NOT NULL,
    reason     text NOT NULL CHECK (octet_length(reason) BETWEEN 1 AND 1000),
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, version)
);
