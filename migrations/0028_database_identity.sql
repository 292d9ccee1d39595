-- What: which server this database is on and on which timeline, and triggers that end all leases when either changes.
-- Why:  a promoted standby or a restored backup may lack the last leases and their epochs. Workers that hold them must
--       stop before anyone else takes their sessions (docs/adr/0012-failover.md).
-- Lock: ACCESS EXCLUSIVE on workers and SHARE ROW EXCLUSIVE on sessions for a moment.

-- The server and its timeline; a promotion starts another timeline. A constant where a server hides them.
CREATE FUNCTION current_database_identity() RETURNS text LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path FROM CURRENT AS $$
BEGIN
    RETURN (SELECT system_identifier FROM pg_control_system())
        || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8);
EXCEPTION WHEN feature_not_supported OR insufficient_privilege OR undefined_function THEN
    RETURN 'hidden';
END $$;

CREATE TABLE database_identity (
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    identity     text NOT NULL,
    -- No session is leased until then: a lease that this database has lost may last as long.
    fenced_until timestamptz NOT NULL DEFAULT 'epoch',
    -- Epochs that this database may have lost are not higher.
    epoch_floor  bigint NOT NULL DEFAULT 0
);
INSERT INTO database_identity (identity) VALUES (current_database_identity());

-- The identity of the database that the worker's incarnation registered with.
ALTER TABLE workers ADD COLUMN database_identity text;
UPDATE workers SET database_identity = current_database_identity();

-- A registration takes over the identity, and is the first to see a new one. A renewal is refused if the incarnation
-- registered with another database: the worker then kills its sandboxes and registers again.
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
