-- Adds a batch of changes to the sums of their tenants. The caller has locked output_fold. Changes of a tenant that was
-- deleted meanwhile are dropped.
WITH old AS (
    SELECT id FROM output_changes WHERE id > $1 ORDER BY id LIMIT $2
),
deleted AS (
    DELETE FROM output_changes c USING old WHERE c.id = old.id RETURNING c.id, c.tenant_id, c.day, c.bytes
),
added AS (
    INSERT INTO tenant_output AS o (tenant_id, day, bytes)
    SELECT d.tenant_id, d.day, sum(d.bytes) FROM deleted d JOIN tenants t ON t.id = d.tenant_id
    GROUP BY d.tenant_id, d.day
    -- The order in which rows are locked.
    ORDER BY d.tenant_id, d.day
    ON CONFLICT (tenant_id, day) DO UPDATE SET bytes = o.bytes + excluded.bytes
)
SELECT count(*) AS "count!", max(id) AS last FROM deleted
