-- Tools of tenants with their declared policies. A run that names a tool is held to its declaration, and
-- refused while the tool is quarantined.

CREATE TABLE tools (
    tenant_id         text NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
    id                text NOT NULL CHECK (id ~ '^[a-z0-9-]{1,63}$'),
    -- From 1, raised by each change of the declaration.
    version           bigint NOT NULL CHECK (version > 0),
    declaration       jsonb NOT NULL,
    -- The isolation that it declares.
    level             text NOT NULL CHECK (level IN ('LEVEL_0', 'LEVEL_1', 'LEVEL_2')),
    -- The key that registered this version.
    key_id            uuid NOT NULL,
    created_at        timestamptz NOT NULL DEFAULT now(),
    updated_at        timestamptz NOT NULL DEFAULT now(),
    -- An operator's approval of the level, for this version only.
    approved_version  bigint CHECK (approved_version = version),
    approved_reason   text CHECK (octet_length(approved_reason) BETWEEN 1 AND 1000),
    approved_key      uuid,
    approved_at       timestamptz,
    -- Set while runs that name it are refused.
    quarantined_at    timestamptz,
    quarantine_reason text CHECK (octet_length(quarantine_reason) BETWEEN 1 AND 2000),
    -- Who did it: a key, or Codelia because of a run.
    quarantine_key    uuid,
    quarantine_run    uuid,
    PRIMARY KEY (tenant_id, id),
    CHECK (num_nonnulls(approved_version, approved_reason, approved_key, approved_at) IN (0, 4)),
    CHECK (CASE WHEN quarantined_at IS NULL THEN num_nonnulls(quarantine_reason, quarantine_key, quarantine_run) = 0
                ELSE quarantine_reason IS NOT NULL AND num_nonnulls(quarantine_key, quarantine_run) = 1 END)
);

-- Quarantines a tool, by a key or because of a run. Returns true if it was not quarantined before, null if
-- there is no such tool. A worker may do this and no other change.
CREATE FUNCTION quarantine_tool(tenant text, tool text, why text, key uuid, run uuid) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE tools SET quarantined_at = now(), quarantine_reason = why, quarantine_key = key, quarantine_run = run
    WHERE tenant_id = tenant AND id = tool AND quarantined_at IS NULL;
    IF NOT FOUND THEN
        RETURN (SELECT false FROM tools WHERE tenant_id = tenant AND id = tool);
    END IF;
    UPDATE tenants SET tools_version = tools_version + 1 WHERE id = tenant;
    RETURN true;
END $$;
