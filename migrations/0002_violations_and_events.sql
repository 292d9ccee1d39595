-- What: what runs tried against their policy; events: refusals, blocked calls and alerts.
-- Why:  an attempt must leave a trace that names it, also when the caller hides what it got.
-- Lock: ACCESS EXCLUSIVE on runs for a moment; a column without a default rewrites nothing.

-- Each different thing once, at most 100, and how often there was any. Null if there was none.
ALTER TABLE runs ADD COLUMN violations jsonb CHECK (jsonb_array_length(violations -> 'seen') BETWEEN 1 AND 100);

CREATE TABLE events (
    -- Rises with time.
    id         uuid PRIMARY KEY,
    created_at timestamptz NOT NULL DEFAULT now(),
    kind       text NOT NULL CHECK (kind ~ '^[A-Z][A-Z0-9_]{0,62}$'),
    -- Null for what concerns no tenant.
    tenant_id  text REFERENCES tenants (id),
    session_id uuid,
    run_id     uuid,
    key_id     uuid,
    worker_id  text,
    -- The field of the request or policy at fault.
    field      text,
    detail     jsonb NOT NULL,
    CHECK (run_id IS NULL OR session_id IS NOT NULL),
    CHECK (session_id IS NULL OR tenant_id IS NOT NULL)
);

CREATE INDEX events_by_tenant ON events (tenant_id, id);
CREATE INDEX events_by_time ON events (created_at);
