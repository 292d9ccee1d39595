-- What: `alerts`, what a webhook is to be told of, and the response to an attempt to escape that the store carries out.
-- Why:  the tool is quarantined and the alert is queued in the statement that ends the run: both or neither.
-- Lock: SHARE ROW EXCLUSIVE on events for a moment, for the trigger; a new table.

CREATE TABLE alerts (
    -- The id of the event.
    id       uuid PRIMARY KEY,
    body     jsonb NOT NULL,
    attempts integer NOT NULL DEFAULT 0,
    -- When it may be sent again.
    next_at  timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX alerts_by_time ON alerts (next_at);

-- Quarantines the tool of the run and queues an alert, as the event says. At most 10,000 alerts wait; the event itself is
-- kept in any case.
CREATE FUNCTION respond_to_escape() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.detail #>> '{response,quarantine_tool}')::boolean AND NEW.detail ->> 'tool' IS NOT NULL THEN
        PERFORM quarantine_tool(NEW.tenant_id, NEW.detail ->> 'tool', NEW.detail ->> 'reason', NULL, NEW.run_id);
    END IF;
    IF (NEW.detail ->> 'webhook')::boolean AND (SELECT count(*) FROM alerts) < 10000 THEN
        INSERT INTO alerts (id, body) VALUES (NEW.id, jsonb_build_object(
            'event_id', NEW.id, 'kind', NEW.kind, 'time', NEW.created_at, 'tenant_id', NEW.tenant_id,
            'session_id', NEW.session_id, 'run_id', NEW.run_id, 'worker_id', NEW.worker_id, 'detail', NEW.detail - 'webhook'));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER respond_to_escape AFTER INSERT ON events FOR EACH ROW WHEN (NEW.kind = 'ESCAPE_ATTEMPT')
    EXECUTE FUNCTION respond_to_escape();
