-- Mode flags: rules that choose the mode of new sessions or raise their floor, with their history and what
-- happened under them. Operators move sessions to another mode at run time, in part, and back.

-- One row, raised by every change: processes read it to learn that their rules are outdated. Changes take
-- their turn on it.
CREATE TABLE flag_version (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    version  bigint NOT NULL
);
INSERT INTO flag_version (version) VALUES (1);

-- The flags that exist.
CREATE TABLE flags (
    id       text PRIMARY KEY CHECK (id ~ '^[a-z0-9-]{1,63}$'),
    -- The latest one in flag_revisions.
    revision bigint NOT NULL CHECK (revision > 0)
);

-- What each flag was set to.
CREATE TABLE flag_revisions (
    flag_id    text NOT NULL REFERENCES flags (id) ON DELETE CASCADE,
    revision   bigint NOT NULL CHECK (revision > 0),
    -- The revision that introduced its rule, which is an earlier one after a rollback. 0: the flag is off.
    origin     bigint NOT NULL CHECK (origin BETWEEN 0 AND revision),
    rule       jsonb CHECK ((rule IS NULL) = (origin = 0)),
    action     text NOT NULL CHECK (action IN ('set', 'rollback', 'guard')),
    reason     text NOT NULL CHECK (octet_length(reason) BETWEEN 1 AND 2000),
    -- The operator's key. Null if the guard rolled back.
    key_id     uuid CHECK ((key_id IS NULL) = (action = 'guard')),
    created_at timestamptz NOT NULL DEFAULT now(),
    -- What happened under it. Apis and workers add to these in batches.
    sessions         bigint NOT NULL DEFAULT 0,
    refused_sessions bigint NOT NULL DEFAULT 0,
    runs             bigint NOT NULL DEFAULT 0,
    refused_runs     bigint NOT NULL DEFAULT 0,
    failed_runs      bigint NOT NULL DEFAULT 0,
    -- Setup times, by bucket; see policy/src/flags/guard.rs.
    setups           bigint[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (flag_id, revision)
);
