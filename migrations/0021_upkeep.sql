-- What: who does the periodic work of the installation; when each open session is looked at next; how long the rows of
--       a tenant are kept.
-- Why:  one process sweeps instead of all of them; a sweep must not read sessions and runs that are not due; tenants
--       may need rows for a longer or shorter time than others.
-- Lock: ACCESS EXCLUSIVE on sessions and tenants for a moment; columns with a constant default or none rewrite nothing.

-- One row. A process owns the work until `until`, and may then be replaced.
CREATE TABLE upkeep_owner (
    only_row    boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    holder      uuid,
    until       timestamptz NOT NULL DEFAULT 'epoch',
    -- Queued runs of all tenants, as the owner counted them last.
    queue_depth bigint NOT NULL DEFAULT 0
);
INSERT INTO upkeep_owner DEFAULT VALUES;

-- The smallest id that is generated at this time.
CREATE FUNCTION id_at(at timestamptz) RETURNS uuid LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (lpad(to_hex(greatest(floor(extract(epoch FROM at) * 1000), 0)::bigint), 12, '0') || repeat('0', 20))::uuid
$$;

ALTER TABLE sessions
    -- Upkeep looks at an open session when this time has come: it may have expired or been idle for too long. Rows
    -- of earlier versions are due at once.
    ADD COLUMN check_at timestamptz NOT NULL DEFAULT 'epoch',
    -- Every run that ended before this time is accounted for in idle_since and used_at. Null for rows of earlier versions.
    ADD COLUMN checked_at timestamptz,
    -- The runs that had not ended then.
    ADD COLUMN live_runs uuid[] NOT NULL DEFAULT '{}',
    -- The last use that a check found.
    ADD COLUMN idle_since timestamptz;

ALTER TABLE tenants
    -- Null is the installation's.
    ADD COLUMN retention_runs interval CHECK (retention_runs > interval '0'),
    ADD COLUMN retention_output interval CHECK (retention_output > interval '0'),
    ADD COLUMN retention_events interval CHECK (retention_events > interval '0'),
    ADD COLUMN retention_audit interval CHECK (retention_audit > interval '0');
