-- The least isolation that a tenant's sessions and runs may have. Only an administrator lowers it, and says why.
ALTER TABLE tenants
    ADD COLUMN isolation_floor text NOT NULL DEFAULT 'LEVEL_2'
        CHECK (isolation_floor IN ('LEVEL_0', 'LEVEL_1', 'LEVEL_2')),
    ADD COLUMN floor_reason text CHECK (length(floor_reason) BETWEEN 1 AND 1000),
    -- The key that decided; none for what the installation does for itself.
    ADD COLUMN floor_key uuid,
    ADD COLUMN floor_set_at timestamptz,
    ADD CHECK ((floor_reason IS NULL) = (floor_set_at IS NULL)),
    ADD CHECK (isolation_floor = 'LEVEL_2' OR floor_reason IS NOT NULL);
