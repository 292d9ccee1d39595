-- What: approvals, requests that a person decides about; runs that wait for one, in the state `held`.
-- Why:  a wider network or less isolation needs a person's decision. A held run is in no index range that workers read:
--       waiting for a person costs them nothing, and earlier programs cannot start it.
-- Lock: ACCESS EXCLUSIVE on live_runs for a moment; new columns without a default rewrite nothing, and the new
--       constraints are not checked for old rows, which all satisfy them. Restart all processes: earlier programs cannot
--       read a held run.

CREATE TABLE approvals (
    id            uuid PRIMARY KEY,
    tenant_id     text NOT NULL REFERENCES tenants (id),
    -- The session and the run that it was requested for. They may be deleted before a grant to the tenant.
    session_id    uuid NOT NULL,
    run_id        uuid,
    -- What is requested, such as network_host. Programs know the kinds; see store/src/approval.
    kind          text NOT NULL CHECK (kind ~ '^[a-z][a-z_]{0,62}$'),
    -- The host and port that it is about; empty and 0 if the kind has none.
    host          text NOT NULL CHECK (octet_length(host) <= 255),
    port          integer NOT NULL CHECK (port BETWEEN 0 AND 65535),
    -- The key that started the run. It may not decide.
    requested_by  uuid NOT NULL,
    -- For the person who decides.
    message       text NOT NULL CHECK (octet_length(message) BETWEEN 1 AND 1000),
    state         text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'allowed', 'denied', 'expired')),
    scope         text CHECK (scope IN ('once', 'session', 'tenant')),
    -- Null if nobody decided.
    decided_by    uuid,
    reason        text CHECK (octet_length(reason) BETWEEN 1 AND 1000),
    created_at    timestamptz NOT NULL DEFAULT now(),
    -- A pending one has expired from here on, whether or not a sweep recorded it.
    expires_at    timestamptz NOT NULL,
    decided_at    timestamptz,
    revoked_by    uuid,
    revoked_at    timestamptz,
    revoke_reason text CHECK (octet_length(revoke_reason) BETWEEN 1 AND 1000),
    -- When the row changed last.
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK ((state = 'pending') = (decided_at IS NULL)),
    CHECK ((state = 'allowed') = (scope IS NOT NULL)),
    CHECK ((state IN ('allowed', 'denied')) = (decided_by IS NOT NULL)),
    CHECK (decided_by <> requested_by),
    CHECK (revoked_at IS NULL OR state = 'allowed'),
    CHECK ((revoked_at IS NULL) = (revoked_by IS NULL))
);
CREATE INDEX approvals_by_tenant ON approvals (tenant_id, id);
CREATE INDEX approvals_by_change ON approvals (tenant_id, changed_at);
CREATE INDEX approvals_by_run ON approvals (run_id, kind, host, port, id);
CREATE INDEX approvals_pending ON approvals (tenant_id, id) WHERE state = 'pending';
CREATE INDEX approvals_pending_by_deadline ON approvals (expires_at) WHERE state = 'pending';
CREATE UNIQUE INDEX approvals_pending_of_run ON approvals (run_id, kind, host, port) WHERE state = 'pending';
-- Grants: what holds for later runs, too.
CREATE INDEX approvals_granted ON approvals (tenant_id, kind, host, port)
    WHERE state = 'allowed' AND scope <> 'once' AND revoked_at IS NULL;

ALTER TABLE live_runs
    -- The approval that a held run waits for.
    ADD COLUMN approval_id uuid,
    -- The key that started the run, if the run may request approvals.
    ADD COLUMN requested_by uuid,
    DROP CONSTRAINT live_runs_state_check,
    -- held: waits for an approval. queued: no worker may have begun it. running: the named worker may have.
    ADD CONSTRAINT live_runs_state_check CHECK (state IN ('held', 'queued', 'running')) NOT VALID,
    ADD CONSTRAINT live_runs_held_check CHECK ((state = 'held') = (approval_id IS NOT NULL)) NOT VALID,
    ADD CONSTRAINT live_runs_held_worker_check
        CHECK (state <> 'held' OR (worker_id IS NULL AND incarnation IS NULL AND lease_epoch IS NULL)) NOT VALID;
