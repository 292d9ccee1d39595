-- What: finds the last ended session with an alias.
-- Why:  a call that names an ended session by its alias answers when and why it ended.
-- Lock: SHARE on sessions while the index is built.

CREATE INDEX sessions_ended_by_alias ON sessions (tenant_id, alias, ended_at) WHERE state = 'ended' AND alias IS NOT NULL;
