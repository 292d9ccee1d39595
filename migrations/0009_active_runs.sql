-- What: whose run it is, in a column of its own for as long as it has not ended.
-- Why:  quotas count the runs of a tenant that have not ended. A planner without statistics may take any index that begins
--       with the tenant for that, and then reads every run that ever was; of this column there is only one.
-- Lock: ACCESS EXCLUSIVE on runs while the table is written anew.

ALTER TABLE runs ADD COLUMN active_tenant text
    GENERATED ALWAYS AS (CASE WHEN state <> 'ended' THEN tenant_id END) STORED;
DROP INDEX runs_active_by_tenant;
CREATE INDEX runs_by_active_tenant ON runs (active_tenant, state) WHERE active_tenant IS NOT NULL;
