-- Deletes the ended runs $1, whose ids are from $2 to $3, except for their labels.
WITH deleted AS (
    DELETE FROM ended_runs WHERE id = ANY ($1) AND id >= $2 AND id <= $3 RETURNING id, tenant_id
),
deleted_output AS (
    DELETE FROM run_output WHERE run_id = ANY ($1) AND run_id >= $2 AND run_id <= $3
    RETURNING run_id, coalesce(length, octet_length(data)) AS bytes, object
),
removed_objects AS (
    INSERT INTO output_removals SELECT DISTINCT object FROM deleted_output WHERE object IS NOT NULL ON CONFLICT DO NOTHING
),
deleted_keys AS (
    DELETE FROM run_keys WHERE run_id = ANY ($1)
),
counted AS (
    INSERT INTO output_changes (tenant_id, day, bytes)
    SELECT d.tenant_id, run_day(d.id), -sum(o.bytes) FROM deleted d JOIN deleted_output o ON o.run_id = d.id
    GROUP BY d.tenant_id, run_day(d.id)
)
SELECT count(*) AS "deleted!" FROM deleted
