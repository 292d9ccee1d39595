-- What: sessions that have ended and have queued runs left; runs that were retried, by session; since when the upkeep
--       has watched without a gap.
-- Why:  a session ends at once, and its queue in batches. Whether a session has files is known without reading its queue.
--       A root is gone if its workers were not seen for a minute, and after a jump of the clock, or an outage of the
--       database, nobody could have seen them.
-- Lock: ACCESS EXCLUSIVE on upkeep_owner and SHARE on live_runs for a moment.

CREATE TABLE ending_sessions (
    session_id uuid PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    -- How its queued runs end.
    outcome    jsonb NOT NULL
);

CREATE INDEX live_runs_retried ON live_runs (session_id) WHERE attempt > 1;

-- The upkeep renews its claim every second. A longer gap than the one in root_is_gone sets it again.
ALTER TABLE upkeep_owner ADD COLUMN watching_since timestamptz NOT NULL DEFAULT now();

CREATE OR REPLACE FUNCTION root_is_gone(root uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT NOT EXISTS (SELECT 1 FROM workers
                       WHERE root_id = root AND (lease_until > now() OR heartbeat_at > now() - interval '1 minute'))
       AND EXISTS (SELECT 1 FROM upkeep_owner
                   WHERE watching_since <= now() - interval '1 minute' AND until > now() - interval '30 seconds')
$$;
