-- What: whether nobody has had a root for longer than a restart takes.
-- Why:  it decides who may take a session and whether its files are lost, in four statements that must agree.
-- Lock: none.

CREATE FUNCTION root_is_gone(root uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT 1 FROM workers
                       WHERE root_id = root AND (lease_until > now() OR heartbeat_at > now() - interval '1 minute'))
$$;
