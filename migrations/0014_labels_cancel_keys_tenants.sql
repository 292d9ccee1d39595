-- What: an index on labels; why and how gently a run was canceled; when a key expires and was last used; suspended and
--       deleted tenants; whether a worker drains by itself.
-- Why:  lists are filtered by label; a cancellation must outlive the call that requests it; keys must be able to end by
--       themselves; an operator must be able to stop and remove a tenant, and to take back a drain.
-- Lock: SHARE on runs and sessions while the indexes are built; otherwise ACCESS EXCLUSIVE for a moment, as columns
--       without a default or with a constant one rewrite nothing.

-- One text for each label, with the tenant: no index entry is shared between tenants, so the labels of one never slow
-- down the lists of another. The length of the key keeps `a=b` and `c` apart from `a` and `b=c`.
CREATE FUNCTION label_tokens(tenant text, labels jsonb) RETURNS text[] LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT coalesce(array_agg(tenant || '/' || length(key) || '/' || key || value), '{}') FROM jsonb_each_text(labels)
$$;

-- Rows without labels cost nothing here.
CREATE INDEX runs_by_label ON runs USING gin (label_tokens(tenant_id, labels)) WHERE labels <> '{}';
CREATE INDEX sessions_by_label ON sessions USING gin (label_tokens(tenant_id, labels)) WHERE labels <> '{}';

ALTER TABLE runs
    ADD COLUMN cancel_reason text CHECK (octet_length(cancel_reason) BETWEEN 1 AND 1000),
    -- From SIGTERM to SIGKILL. Null takes the worker's setting.
    ADD COLUMN cancel_grace interval CHECK (cancel_grace >= interval '0'),
    ADD CHECK (cancel_requested_at IS NOT NULL OR cancel_grace IS NULL);

ALTER TABLE api_keys
    -- The key is refused from this time on. Null never expires.
    ADD COLUMN expires_at timestamptz,
    -- Written at most once a minute.
    ADD COLUMN last_used_at timestamptz;

ALTER TABLE tenants
    ADD COLUMN suspended_at timestamptz,
    ADD COLUMN suspend_reason text CHECK (octet_length(suspend_reason) BETWEEN 1 AND 1000),
    -- Its rows are deleted once its sandboxes and directories are gone. A deleted tenant is suspended.
    ADD COLUMN deleted_at timestamptz,
    ADD CHECK ((suspended_at IS NULL) = (suspend_reason IS NULL)),
    ADD CHECK (deleted_at IS NULL OR suspended_at IS NOT NULL);

CREATE INDEX tenants_suspended ON tenants (id) WHERE suspended_at IS NOT NULL;

-- The worker drains because it shuts down or a sandbox left something behind: an operator cannot take that back.
ALTER TABLE workers ADD COLUMN drains_itself boolean NOT NULL DEFAULT false;
