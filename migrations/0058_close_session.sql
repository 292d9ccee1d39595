-- What: a function that closes a session.
-- Why:  closing needs two statements in one transaction: the second sees the runs that the first waited for. In a function
--       they are one message to the server instead of five.
-- Lock: none.

-- Closes a session and marks its queued runs to be ended with an outcome. Returns the session as it is then, and whether
-- it has such runs. Each statement has a snapshot of its own: the second sees runs whose insert the first waited for.
CREATE FUNCTION close_session(of_tenant text, of_id uuid, of_alias text, queue_outcome jsonb)
RETURNS TABLE (session sessions, has_queue boolean)
LANGUAGE plpgsql AS $$
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
