-- The audit: what happened and who decided it, signed so that a row that was changed, removed or added later
-- is found; and the alerts that some of its events queue.

CREATE TABLE audit (
    -- The process that wrote it.
    writer     uuid NOT NULL,
    -- Rises with time. Partitions are by its day.
    id         uuid NOT NULL,
    at         timestamptz NOT NULL,
    kind       text NOT NULL CHECK (kind ~ '^[A-Z][A-Z0-9_]{0,62}$'),
    -- Null for what concerns no tenant. No foreign keys: rows outlive what they are about.
    tenant_id  text,
    session_id uuid,
    run_id     uuid,
    key_id     uuid,
    worker_id  text,
    -- The field of the request or policy at fault.
    field      text,
    -- JSON, exactly as it was signed.
    detail     text NOT NULL,
    -- Keyed hash of all columns above. Null if the installation has no key.
    mac        bytea CHECK (length(mac) = 32),
    PRIMARY KEY (writer, id)
) PARTITION BY RANGE (id);
CREATE INDEX audit_by_tenant ON audit (tenant_id, id);
CREATE INDEX audit_by_session ON audit (session_id, id) WHERE session_id IS NOT NULL;
CREATE TABLE audit_default PARTITION OF audit DEFAULT;

-- Signed lists of the rows of the audit.
CREATE TABLE audit_checkpoints (
    writer    uuid NOT NULL,
    -- Counts from 1 for each writer.
    number    bigint NOT NULL CHECK (number > 0),
    at        timestamptz NOT NULL,
    -- The rows of this writer that were stored since its previous checkpoint.
    entries   uuid[] NOT NULL,
    -- The last checkpoints of other writers that this one saw, as JSON.
    others    text NOT NULL,
    -- The hash of the writer's previous checkpoint; zeros for the first.
    previous  bytea NOT NULL CHECK (length(previous) = 32),
    -- Covers all columns above and the content of the rows.
    hash      bytea NOT NULL CHECK (length(hash) = 32),
    -- Of the hash, by the installation's key.
    signature bytea NOT NULL CHECK (length(signature) = 64),
    PRIMARY KEY (writer, number)
);
CREATE INDEX audit_checkpoints_by_time ON audit_checkpoints (at);

-- The owner of a table needs no privilege: this stops a service that connects as the owner.
CREATE FUNCTION refuse_audit_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE 'audit rows are never changed or deleted one by one' USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON audit FOR EACH ROW EXECUTE FUNCTION refuse_audit_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON audit FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE ON audit_checkpoints FOR EACH ROW EXECUTE FUNCTION refuse_audit_change();
CREATE TRIGGER append_only_truncate BEFORE TRUNCATE ON audit_checkpoints
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_audit_change();

-- Makes the partition of a day, such as audit_20300131. Repeating it changes nothing. If the default
-- partition has rows of that day, which a wrong clock made, they stay there with all others of the day.
-- Fails without the locks.
CREATE FUNCTION create_audit_partition(day date) RETURNS void LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
DECLARE
    lower uuid := run_id_at(day::timestamp AT TIME ZONE 'UTC');
    upper uuid := run_id_at((day + 1)::timestamp AT TIME ZONE 'UTC');
    part text := 'audit' || to_char(day, '_YYYYMMDD');
BEGIN
    IF to_regclass(part) IS NOT NULL OR EXISTS (SELECT 1 FROM audit_default WHERE id >= lower AND id < upper) THEN
        RETURN;
    END IF;
    EXECUTE format('CREATE TABLE %I (LIKE audit INCLUDING CONSTRAINTS INCLUDING STORAGE)', part);
    EXECUTE format('ALTER TABLE audit ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)', part, lower, upper);
END $$;
SELECT create_audit_partition((now() AT TIME ZONE 'UTC')::date + days) FROM generate_series(0, 2) AS days;

-- Drops the rows of a day that ended at least a day ago, with all checkpoints that name a row of it or of
-- earlier days.
CREATE FUNCTION drop_audit_partition(day date) RETURNS void LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
BEGIN
    IF day >= (now() AT TIME ZONE 'UTC')::date - 1 THEN
        RAISE 'not a past day: %', day;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS %I', 'audit' || to_char(day, '_YYYYMMDD'));
    ALTER TABLE audit_checkpoints DISABLE TRIGGER append_only;
    -- A checkpoint is made within a minute after its rows.
    DELETE FROM audit_checkpoints WHERE at < ((day + 1)::timestamp AT TIME ZONE 'UTC') + interval '1 minute';
    ALTER TABLE audit_checkpoints ENABLE TRIGGER append_only;
END $$;

-- What a webhook is to be told of.
CREATE TABLE alerts (
    -- The id of the event.
    id       uuid PRIMARY KEY,
    body     jsonb NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    -- When it may be sent again.
    next_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX alerts_by_time ON alerts (next_at);

-- Quarantines the tool and the session of a run and queues an alert, as the event says: in the statement that
-- records the event, so both or neither. At most 10,000 alerts wait; the event itself is kept in any case.
CREATE FUNCTION respond_to_escape() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    detail jsonb := NEW.detail;
BEGIN
    IF (detail #>> '{response,quarantine_tool}')::boolean AND detail ->> 'tool' IS NOT NULL THEN
        PERFORM quarantine_tool(NEW.tenant_id, detail ->> 'tool', detail ->> 'reason', NULL, NEW.run_id);
    END IF;
    IF (detail #>> '{response,quarantine_session}')::boolean AND NEW.session_id IS NOT NULL THEN
        PERFORM quarantine_session(NEW.tenant_id, NEW.session_id, detail ->> 'reason', NEW.run_id);
    END IF;
    IF (detail ->> 'webhook')::boolean AND (SELECT count(*) FROM alerts) < 10000 THEN
        INSERT INTO alerts (id, body) VALUES (NEW.id, jsonb_build_object(
            'event_id', NEW.id, 'kind', NEW.kind, 'time', NEW.at, 'tenant_id', NEW.tenant_id, 'session_id', NEW.session_id,
            'run_id', NEW.run_id, 'worker_id', NEW.worker_id, 'detail', detail - 'webhook'));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER respond_to_escape AFTER INSERT ON audit FOR EACH ROW
    WHEN (NEW.kind IN ('ESCAPE_ATTEMPT', 'SUSPICIOUS_OPERATIONS')) EXECUTE FUNCTION respond_to_escape();
