-- Policies of tenants, projects and users, between that of the installation and those of sessions. Each
-- change is a new version: operators and tenants see who restricted what, when and why.

-- Policies of tenants.
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

-- Policies of the projects and users of a tenant.
CREATE TABLE scope_policies (
    tenant_id  text NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    scope      text NOT NULL CHECK (scope IN ('project', 'user')),
    -- Of a project its name, of a user the id of the key.
    name       text NOT NULL CHECK (octet_length(name) BETWEEN 1 AND 63),
    -- The rest as in tenant_policies.
    version    bigint NOT NULL CHECK (version > 0),
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

-- Whether the policies above a scope leave the field to it: that of the organisation, and for a user in a
-- project also that of the project.
CREATE FUNCTION scope_delegates(tenant text, in_scope text, in_project text, field text) RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT policy -> 'delegate' ? field FROM tenant_policies WHERE tenant_id = tenant
                     ORDER BY version DESC LIMIT 1), false)
       AND (in_scope <> 'user' OR in_project IS NULL
            OR coalesce((SELECT policy -> 'delegate' ? field FROM scope_policies
                         WHERE tenant_id = tenant AND scope = 'project' AND name = in_project
                         ORDER BY version DESC LIMIT 1), false))
$$;
