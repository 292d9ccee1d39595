-- What: the quarantine of a session, as a response to an attempt to escape.
-- Why:  a quarantined session takes no runs and no changes of its files until an administrator releases it. The statement
--       that records the attempt quarantines it: both or neither.
-- Lock: ACCESS EXCLUSIVE on sessions for a moment: the new columns are null, and the constraint is not checked for old rows.

ALTER TABLE sessions
    ADD COLUMN quarantined_at    timestamptz,
    ADD COLUMN quarantine_reason text,
    -- The run because of which it was done; null if a file call was.
    ADD COLUMN quarantine_run    uuid;
ALTER TABLE sessions ADD CONSTRAINT sessions_quarantine CHECK (
    CASE WHEN quarantined_at IS NULL THEN num_nonnulls(quarantine_reason, quarantine_run) = 0
         ELSE quarantine_reason IS NOT NULL AND octet_length(quarantine_reason) BETWEEN 1 AND 2000 END) NOT VALID;

-- Quarantines an open session, and refuses its queued and held runs; the upkeep ends them. A session that is quarantined
-- already keeps its first reason.
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

-- As before, and quarantines the session.
CREATE OR REPLACE FUNCTION respond_to_escape() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.detail #>> '{response,quarantine_tool}')::boolean AND NEW.detail ->> 'tool' IS NOT NULL THEN
        PERFORM quarantine_tool(NEW.tenant_id, NEW.detail ->> 'tool', NEW.detail ->> 'reason', NULL, NEW.run_id);
    END IF;
    IF (NEW.detail #>> '{response,quarantine_session}')::boolean AND NEW.session_id IS NOT NULL THEN
        PERFORM quarantine_session(NEW.tenant_id, NEW.session_id, NEW.detail ->> 'reason', NEW.run_id);
    END IF;
    IF (NEW.detail ->> 'webhook')::boolean AND (SELECT count(*) FROM alerts) < 10000 THEN
        INSERT INTO alerts (id, body) VALUES (NEW.id, jsonb_build_object(
            'event_id', NEW.id, 'kind', NEW.kind, 'time', NEW.created_at, 'tenant_id', NEW.tenant_id,
            'session_id', NEW.session_id, 'run_id', NEW.run_id, 'worker_id', NEW.worker_id, 'detail', NEW.detail - 'webhook'));
    END IF;
    RETURN NULL;
END $$;
