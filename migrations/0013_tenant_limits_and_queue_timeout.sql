-- What: the highest limits of a tenant; how long a run may wait for a worker.
-- Why:  one tenant may need more than the installation allows, or less; a run that no worker takes must end.
-- Lock: ACCESS EXCLUSIVE on tenants and runs for a moment; constant defaults rewrite nothing.

-- Only what differs from the installation, as in `LimitsRequest`.
ALTER TABLE tenants ADD COLUMN max_limits jsonb NOT NULL DEFAULT '{}';

ALTER TABLE runs
    -- Null for runs of earlier versions, which wait indefinitely.
    ADD COLUMN queue_timeout interval CHECK (queue_timeout > interval '0'),
    -- When a queued run ends; a retry sets it again.
    ADD COLUMN queued_until timestamptz;

CREATE INDEX runs_queued_by_deadline ON runs (queued_until) WHERE state = 'queued';
