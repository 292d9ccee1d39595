-- Sessions with their leases, and what they use on the disk.

-- One text for each label, with the tenant: no index entry is shared between tenants, so the labels of one
-- never slow down the lists of another. The length of the key keeps `a=b` and `c` apart from `a` and `b=c`.
CREATE FUNCTION label_tokens(tenant text, labels jsonb) RETURNS text[] LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(array_agg(tenant || '/' || length(key) || '/' || key || value), '{}') FROM jsonb_each_text(labels)
$$;

-- A workspace and the runs in it. One worker at a time holds it by a lease.
CREATE TABLE sessions (
    id                uuid PRIMARY KEY,
    tenant_id         text NOT NULL REFERENCES tenants (id),
    -- The key that created it.
    created_by        uuid,
    alias             text CHECK (alias ~ '^[a-z0-9-]{1,63}$'),
    spec              jsonb NOT NULL,
    -- The lists of hosts and ports of the spec, if they were changed after it was created. The rest of
    -- the spec never changes, and processes keep copies of it.
    network           jsonb,
    labels            jsonb NOT NULL,
    -- Whether it may start again empty if its files are lost: only its caller can tell whether an empty
    -- directory is better than none.
    allow_data_loss   boolean NOT NULL DEFAULT false,
    idempotency_key   text,
    request_hash      bytea,

    state             text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'ended')),
    -- Whose session it is as long as it is open. A planner without statistics may take any index that
    -- begins with the tenant, and then reads all its ended sessions; of this column there is only one.
    open_tenant       text GENERATED ALWAYS AS (CASE WHEN state = 'open' THEN tenant_id END) STORED,
    end_reason        text CHECK (end_reason IN ('closed', 'expired', 'idle', 'data_lost')),
    created_at        timestamptz NOT NULL DEFAULT now(),
    expires_at        timestamptz NOT NULL,
    ended_at          timestamptz,
    -- When its directory was seen to be gone.
    removed_at        timestamptz,

    -- It ends if it is not used for this long. Runs and file calls use it.
    idle_ttl          interval CHECK (idle_ttl > interval '0'),
    -- When a file call used it, or a run that may have left files.
    used_at           timestamptz,
    -- Upkeep looks at an open session when this time has come: it may have expired or been idle for too long.
    check_at          timestamptz NOT NULL DEFAULT 'epoch',
    -- Every run that ended before this time is accounted for in idle_since and used_at. Null before the
    -- first check.
    checked_at        timestamptz,
    -- The runs that had not ended then.
    live_runs         uuid[] NOT NULL DEFAULT '{}',
    -- The last use that a check found.
    idle_since        timestamptz,

    lease_worker      text REFERENCES workers (id),
    lease_incarnation uuid,
    lease_epoch       bigint NOT NULL DEFAULT 0 CHECK (lease_epoch >= 0),
    -- The root that holds its files; null until a worker first took it.
    home_root         uuid,

    -- It takes no runs and no changes of its files until an administrator releases it.
    quarantined_at    timestamptz,
    quarantine_reason text,
    -- The run because of which it was done; null if a file call was.
    quarantine_run    uuid,

    UNIQUE (id, tenant_id),
    CHECK ((idempotency_key IS NULL) = (request_hash IS NULL)),
    CHECK ((state = 'ended') = (ended_at IS NOT NULL)),
    CHECK ((state = 'ended') = (end_reason IS NOT NULL)),
    CHECK (removed_at IS NULL OR (state = 'ended' AND lease_worker IS NULL)),
    CHECK ((lease_worker IS NULL) = (lease_incarnation IS NULL)),
    CHECK (lease_worker IS NULL OR home_root IS NOT NULL),
    CHECK (CASE WHEN quarantined_at IS NULL THEN num_nonnulls(quarantine_reason, quarantine_run) = 0
                ELSE quarantine_reason IS NOT NULL AND octet_length(quarantine_reason) BETWEEN 1 AND 2000 END)
);
CREATE UNIQUE INDEX sessions_by_alias ON sessions (tenant_id, alias) WHERE state = 'open';
CREATE UNIQUE INDEX sessions_by_idempotency_key ON sessions (tenant_id, idempotency_key);
CREATE INDEX sessions_by_tenant ON sessions (tenant_id, id);
CREATE INDEX sessions_by_label ON sessions USING gin (label_tokens(tenant_id, labels)) WHERE labels <> '{}';
CREATE INDEX sessions_by_holder ON sessions (lease_worker, lease_incarnation) WHERE lease_worker IS NOT NULL;
CREATE INDEX sessions_open ON sessions (open_tenant, id) WHERE open_tenant IS NOT NULL;
CREATE INDEX sessions_due ON sessions (check_at) WHERE state = 'open';
-- A call that names an ended session by its alias answers when and why the last one ended.
CREATE INDEX sessions_ended_by_alias ON sessions (tenant_id, alias, ended_at)
    WHERE state = 'ended' AND alias IS NOT NULL;
CREATE INDEX sessions_to_remove ON sessions (home_root) WHERE state = 'ended' AND removed_at IS NULL;
CREATE INDEX sessions_to_purge ON sessions (tenant_id, ended_at) WHERE removed_at IS NOT NULL;

-- No worker takes a session before the leases that were lost have ended, and no epoch is given twice.
CREATE FUNCTION check_lease_identity() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
DECLARE
    known database_identity := (SELECT d FROM database_identity d);
BEGIN
    IF known.identity <> current_database_identity() OR known.fenced_until > now() THEN
        RETURN NULL;
    END IF;
    NEW.lease_epoch := greatest(NEW.lease_epoch, known.epoch_floor + 1);
    RETURN NEW;
END $$;
CREATE TRIGGER check_identity BEFORE UPDATE OF lease_epoch ON sessions
    FOR EACH ROW WHEN (NEW.lease_epoch > OLD.lease_epoch) EXECUTE FUNCTION check_lease_identity();

-- Sessions that have queued runs and no live holder; rows that are outdated may be left over. A row is
-- written and deleted only by transactions that have locked the session's row.
CREATE TABLE waiting_sessions (
    session_id      uuid PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    tenant_id       text NOT NULL,
    mode            text NOT NULL,
    -- The root that has its files; zero if any worker may take it.
    root            uuid NOT NULL,
    allow_data_loss boolean NOT NULL,
    since           timestamptz NOT NULL DEFAULT now(),
    -- Tenants in an order in which each is as likely as another to be next after a random number.
    tenant_hash     integer NOT NULL GENERATED ALWAYS AS (hashtext(tenant_id)) STORED
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);
CREATE INDEX waiting_sessions_by_worker ON waiting_sessions (root, mode, tenant_hash, tenant_id, since, session_id);
CREATE INDEX waiting_sessions_by_root ON waiting_sessions (root) WHERE allow_data_loss;

-- Sessions that have ended, or are quarantined, and have queued runs left. A session ends at once, its
-- queue in batches.
CREATE TABLE ending_sessions (
    session_id uuid PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    -- How its queued runs end.
    outcome    jsonb NOT NULL
);

-- Changes of transactional runs that wait for a decision. The holder of the session finds them, refuses
-- what would change the files below them, and drops them in time.
CREATE TABLE held_changes (
    -- One run for each session: its changes are files on the disk of the worker.
    session_id  uuid PRIMARY KEY,
    run_id      uuid NOT NULL,
    -- The lease under which the run was executed. It names the directory of the changes.
    lease_epoch bigint NOT NULL,
    -- The directory tree that has them.
    root        uuid NOT NULL,
    expires_at  timestamptz NOT NULL
);
CREATE INDEX held_changes_by_expiry ON held_changes (root, expires_at);

-- Closes a session and marks its queued runs to be ended with an outcome. Returns the session as it is
-- then, and whether it has such runs. A function is one message to the server instead of five. Each of its
-- statements has a snapshot of its own: the second sees runs whose insert the first waited for.
CREATE FUNCTION close_session(of_tenant text, of_id uuid, of_alias text, queue_outcome jsonb)
RETURNS TABLE (session sessions, has_queue boolean) LANGUAGE plpgsql AS $$
DECLARE
    found_id uuid;
BEGIN
    has_queue := false;
    SELECT s.id INTO found_id FROM sessions s
    WHERE s.tenant_id = of_tenant AND (s.id = of_id OR (s.alias = of_alias AND s.state = 'open'));
    IF found_id IS NULL THEN
        RETURN;
    END IF;
    UPDATE sessions s SET state = 'ended', end_reason = 'closed', ended_at = now(),
        -- A session that was never leased has no directory.
        removed_at = CASE WHEN s.home_root IS NULL THEN now() END
    WHERE s.id = found_id AND s.state = 'open'
    RETURNING s.* INTO session;
    IF session.id IS NULL THEN
        SELECT s.* INTO session FROM sessions s WHERE s.id = found_id;
        IF session.id IS NOT NULL THEN
            RETURN NEXT;
        END IF;
        RETURN;
    END IF;
    INSERT INTO ending_sessions (session_id, outcome)
    SELECT found_id, queue_outcome
    WHERE (SELECT r.id FROM live_runs r WHERE r.session_id = found_id AND r.state IN ('held', 'queued') LIMIT 1) IS NOT NULL
    ON CONFLICT (session_id) DO NOTHING;
    has_queue := FOUND;
    DELETE FROM waiting_sessions w WHERE w.session_id = found_id;
    RETURN NEXT;
END $$;

-- Quarantines an open session, and refuses its queued and held runs; the upkeep ends them. A session that
-- is quarantined already keeps its first reason.
CREATE FUNCTION quarantine_session(tenant text, session uuid, why text, run uuid) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    -- Waits for runs that are being inserted; the next statement sees them.
    UPDATE sessions SET quarantined_at = now(), quarantine_reason = why, quarantine_run = run
    WHERE tenant_id = tenant AND id = session AND state = 'open' AND quarantined_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO ending_sessions (session_id, outcome)
    SELECT session, jsonb_build_object('kind', 'refused', 'detail', jsonb_build_object(
        'reason', 'SESSION_QUARANTINED', 'message', 'session: it was quarantined: ' || why))
    WHERE EXISTS (SELECT 1 FROM live_runs WHERE session_id = session AND state IN ('held', 'queued'))
    ON CONFLICT (session_id) DO NOTHING;
    DELETE FROM waiting_sessions WHERE session_id = session;
    RETURN true;
END $$;
