-- What: whose session it is, in a column of its own for as long as it is open.
-- Why:  the quota of open sessions is counted for every new one; see 0009 for what a planner may do to that otherwise.
-- Lock: ACCESS EXCLUSIVE on sessions while the table is written anew.

ALTER TABLE sessions ADD COLUMN open_tenant text
    GENERATED ALWAYS AS (CASE WHEN state = 'open' THEN tenant_id END) STORED;
DROP INDEX sessions_open_by_tenant;
CREATE INDEX sessions_by_open_tenant ON sessions (open_tenant) WHERE open_tenant IS NOT NULL;
