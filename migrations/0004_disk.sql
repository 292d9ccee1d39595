-- What sessions and tenants use on the disks of workers.

-- What the files of a session use, as its holder measured it last. The row goes with the session's
-- directory. A table of its own, since an update of `sessions` writes the whole row, and the sum of a
-- tenant is read before each run near the quota.
CREATE TABLE session_disk (
    session_id   uuid PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    tenant_id    text NOT NULL,
    -- Where the files are: those of a root that is gone count for nobody.
    root         uuid NOT NULL,
    bytes        bigint NOT NULL CHECK (bytes >= 0),
    inodes       bigint NOT NULL CHECK (inodes >= 0),
    -- How it was measured.
    mechanism    text NOT NULL,
    measured_at  timestamptz NOT NULL,
    -- The share of the limit, in percent, for which an event was recorded: see disk_level.
    bytes_level  smallint NOT NULL CHECK (bytes_level IN (0, 80, 100)),
    inodes_level smallint NOT NULL CHECK (inodes_level IN (0, 80, 100))
) WITH (fillfactor = 70);
CREATE INDEX session_disk_by_tenant ON session_disk (tenant_id);

-- A trigger, since its statement sees what was reported until the session's row was locked.
CREATE FUNCTION forget_session_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM session_disk WHERE session_id = NEW.id;
    RETURN NULL;
END $$;
CREATE TRIGGER forget_disk AFTER UPDATE OF removed_at ON sessions
    FOR EACH ROW WHEN (NEW.removed_at IS NOT NULL) EXECUTE FUNCTION forget_session_disk();

-- The share of each tenant's quota, in percent, for which an event was recorded.
CREATE TABLE tenant_disk_levels (
    tenant_id text PRIMARY KEY REFERENCES tenants (id) ON DELETE CASCADE,
    level     smallint NOT NULL CHECK (level IN (0, 80, 100))
);

-- 100 from all of a limit on (less a thousandth, since a file system refuses what does not fit), 80 from
-- 80 % on, else 0. Falls again only 5 % below, so that usage around a limit is one crossing.
CREATE FUNCTION disk_level(used bigint, max bigint, before smallint) RETURNS smallint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN used >= max - max / 1000 OR (before = 100 AND used >= max::numeric * 0.95) THEN 100
        WHEN used >= max::numeric * 0.80 OR (before >= 80 AND used >= max::numeric * 0.75) THEN 80
        ELSE 0
    END::smallint
$$;

-- What the files of all sessions of a tenant use. Nobody can remove those on a root that is gone, so they
-- do not count.
CREATE FUNCTION tenant_disk_bytes(tenant text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(sum(found.bytes), 0)::bigint
    FROM (SELECT root, sum(bytes) AS bytes FROM session_disk WHERE tenant_id = tenant GROUP BY root) AS found
    WHERE NOT root_is_gone(found.root)
$$;

-- The usage and quota of a tenant, and the level before and now. Of several calls that see a crossing, one
-- returns it. A worker may read only this of a tenant.
CREATE FUNCTION tenant_disk(tenant text, OUT used bigint, OUT quota bigint, OUT level_before smallint, OUT level_now smallint)
LANGUAGE plpgsql AS $$
BEGIN
    used := tenant_disk_bytes(tenant);
    SELECT t.quota_disk_bytes INTO quota FROM tenants t WHERE t.id = tenant;
    level_before := coalesce((SELECT l.level FROM tenant_disk_levels l WHERE l.tenant_id = tenant), 0);
    level_now := coalesce(disk_level(used, quota, level_before), 0);
    IF level_now = level_before OR quota IS NULL THEN
        RETURN;
    END IF;
    INSERT INTO tenant_disk_levels AS l (tenant_id, level) VALUES (tenant, level_now)
    ON CONFLICT (tenant_id) DO UPDATE SET level = excluded.level WHERE l.level = level_before;
    IF NOT FOUND THEN
        level_before := level_now;
    END IF;
END $$;
