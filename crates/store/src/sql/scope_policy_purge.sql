-- Deletes the versions of at most $2 projects and users: those whose policy was deleted longer than $1 ago, and users whose
-- key was revoked as long ago or does not exist.
WITH last AS (
    SELECT DISTINCT ON (tenant_id, scope, name) tenant_id, scope, name, policy IS NULL AS is_deleted, created_at
    FROM scope_policies ORDER BY tenant_id, scope, name, version DESC
),
old AS (
    SELECT tenant_id, scope, name FROM last
    WHERE (is_deleted AND created_at < now() - $1::interval)
       OR (scope = 'user' AND NOT EXISTS (
               SELECT 1 FROM api_keys k WHERE k.tenant_id = last.tenant_id AND k.id::text = last.name
                 AND coalesce(k.revoked_at > now() - $1::interval, true)))
    LIMIT $2
)
DELETE FROM scope_policies p USING old
WHERE p.tenant_id = old.tenant_id AND p.scope = old.scope AND p.name = old.name
