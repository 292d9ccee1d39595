-- Workers, the upkeep of the installation, and the identity of the database that leases depend on.

-- Who does the periodic work of the installation: one row. A process owns the work until `until`, and
-- may then be replaced.
CREATE TABLE upkeep_owner (
    only_row        boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    holder          uuid,
    until           timestamptz NOT NULL DEFAULT 'epoch',
    -- Since when owners have watched without a gap. They renew the claim every second; a gap longer
    -- than the one in root_is_gone sets it again.
    watching_since  timestamptz NOT NULL DEFAULT now(),
    -- Queued runs of all tenants and when the oldest was created, as the owner saw them last.
    queue_depth     bigint NOT NULL DEFAULT 0,
    queue_oldest_at timestamptz
);
INSERT INTO upkeep_owner DEFAULT VALUES;

-- One row for each worker; all its session leases live as long as lease_until does.
CREATE TABLE workers (
    id                 text PRIMARY KEY CHECK (id ~ '^[a-z0-9-]{1,63}$'),
    -- One life of the process; a new one fences the old.
    incarnation        uuid NOT NULL,
    -- Names the directory tree that holds its sessions; workers on a shared root have the same.
    root_id            uuid NOT NULL,
    address            text NOT NULL,
    version            text NOT NULL,
    state              text NOT NULL CHECK (state IN ('ready', 'draining', 'left')),
    -- It drains because it shuts down or a sandbox left something behind: an operator cannot take that back.
    drains_itself      boolean NOT NULL DEFAULT false,
    modes              text[] NOT NULL CHECK (cardinality(modes) > 0),
    -- The modes in which it only watches limits.
    watched_modes      text[] NOT NULL DEFAULT '{}',
    slots              integer NOT NULL CHECK (slots > 0),
    busy_slots         integer NOT NULL DEFAULT 0 CHECK (busy_slots >= 0),
    registered_at      timestamptz NOT NULL DEFAULT now(),
    heartbeat_at       timestamptz NOT NULL DEFAULT now(),
    lease_until        timestamptz NOT NULL,
    -- The identity of the database that the incarnation registered with.
    database_identity  text,
    -- Of the file system that has its sessions. Null until its first report.
    disk_free_bytes    bigint CHECK (disk_free_bytes >= 0),
    disk_reserve_bytes bigint CHECK (disk_reserve_bytes >= 0),
    -- Less is free than the reserve: it takes no new sessions and starts no runs.
    disk_is_short      boolean NOT NULL DEFAULT false
);

-- Whether nobody has had a root for longer than a restart takes. It decides who may take a session and
-- whether its files are lost. After a jump of the clock or an outage of the database nobody could have
-- seen a worker, so the upkeep must have watched for as long.
CREATE FUNCTION root_is_gone(root uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT 1 FROM workers
                       WHERE root_id = root AND (lease_until > now() OR heartbeat_at > now() - interval '1 minute'))
       AND EXISTS (SELECT 1 FROM upkeep_owner
                   WHERE watching_since <= now() - interval '1 minute' AND until > now() - interval '30 seconds')
$$;

-- The server that this database is on and its timeline; a promotion starts another timeline. A constant
-- where a server hides them. A promoted standby or a restored backup may lack the last leases and their
-- epochs: workers that hold them stop before anyone else takes their sessions (docs/adr/0012-failover.md).
CREATE FUNCTION current_database_identity() RETURNS text LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT AS $$
BEGIN
    RETURN (SELECT system_identifier FROM pg_control_system())
        || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function THEN
    RETURN 'hidden';
END $$;

-- The identity that workers last registered with: one row.
CREATE TABLE database_identity (
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    identity     text NOT NULL,
    -- No session is leased until then: a lease that this database has lost may last as long.
    fenced_until timestamptz NOT NULL DEFAULT 'epoch',
    -- Epochs that this database may have lost are not higher.
    epoch_floor  bigint NOT NULL DEFAULT 0
);
INSERT INTO database_identity (identity) VALUES (current_database_identity());

-- A registration takes over the identity, and is the first to see a new one. A renewal is refused if the
-- incarnation registered with another database: the worker then kills its sandboxes and registers again.
CREATE FUNCTION check_worker_identity() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT AS $$
DECLARE
    identity_now text := current_database_identity();
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.incarnation = OLD.incarnation THEN
        IF OLD.database_identity IS DISTINCT FROM identity_now THEN
            RETURN NULL;
        END IF;
        RETURN NEW;
    END IF;
    UPDATE database_identity d SET
        identity = identity_now,
        -- No earlier incarnation acts for longer than its lease time after this.
        fenced_until = now() + greatest(NEW.lease_until - now(), (SELECT max(lease_until - heartbeat_at) FROM workers)),
        epoch_floor = (d.epoch_floor / 1000000000 + 1) * 1000000000
    WHERE d.identity <> identity_now;
    NEW.database_identity := identity_now;
    RETURN NEW;
END $$;
CREATE TRIGGER check_identity BEFORE INSERT OR UPDATE ON workers
    FOR EACH ROW WHEN (NEW.lease_until > now()) EXECUTE FUNCTION check_worker_identity();
