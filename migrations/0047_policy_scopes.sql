-- What: policies of projects and users, next to those of tenants, and the key that created a session.
-- Why:  a tenant restricts its projects, and a user itself; a dry run finds the runs that a policy is about.
-- Lock: SHARE ROW EXCLUSIVE on tenants and ACCESS EXCLUSIVE on sessions for a moment. The new column is null for
--       sessions that exist.

CREATE TABLE scope_policies (
    tenant_id  text NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    scope      text NOT NULL CHECK (scope IN ('project', 'user')),
    -- Of a project its name, of a user the id of the key.
    name       text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 63),
    -- From 1. The highest one is in effect. Rows never change.
    version    bigint NOT NULL CHECK (version > 0),
    -- Null if there is no policy from this version on.
    policy     jsonb,
    key_id     uuid NOT NULL,
    reason     text NOT NULL CHECK (octet_length(reason) BETWEEN 1 AND 1000),
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant_id, scope, name, version)
);

-- The versions of all scopes. That of an organisation is its tenant's.
CREATE VIEW policy_versions AS
    SELECT tenant_id, 'organisation' AS scope, '' AS name, version, policy, key_id, reason, created_at FROM tenant_policies
    UNION ALL
    SELECT tenant_id, scope, name, version, policy, key_id, reason, created_at FROM scope_policies;

ALTER TABLE sessions ADD COLUMN created_by uuid;
