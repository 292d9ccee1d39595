-- Stores what sessions of a worker use, and returns those that it holds with their levels before and now.
WITH held AS (
    SELECT s.id, s.tenant_id, s.home_root, r.mechanism, r.bytes, r.inodes, r.max_bytes, r.max_inodes
    FROM unnest($3::uuid[], $4::bigint[], $5::text[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[])
        AS r (id, epoch, mechanism, bytes, inodes, max_bytes, max_inodes)
    JOIN sessions s ON s.id = r.id
    WHERE s.lease_worker = $1 AND s.lease_incarnation = $2 AND s.lease_epoch = r.epoch AND s.removed_at IS NULL
      AND EXISTS (SELECT 1 FROM workers w WHERE w.id = $1 AND w.incarnation = $2 AND w.lease_until > now())
    -- Keeps the removal of the session from passing, which would leave the row. The next report has what is locked now.
    FOR SHARE OF s SKIP LOCKED
),
stored AS (
    INSERT INTO session_disk AS d (session_id, tenant_id, root, bytes, inodes, mechanism, measured_at,
                                   bytes_level, inodes_level)
    SELECT h.id, h.tenant_id, h.home_root, h.bytes, h.inodes, h.mechanism, now(),
           disk_level(h.bytes, h.max_bytes, coalesce(b.bytes_level, 0::smallint)),
           disk_level(h.inodes, h.max_inodes, coalesce(b.inodes_level, 0::smallint))
    FROM held h LEFT JOIN session_disk b ON b.session_id = h.id
    ON CONFLICT (session_id) DO UPDATE SET
        root = excluded.root, bytes = excluded.bytes, inodes = excluded.inodes, mechanism = excluded.mechanism,
        measured_at = excluded.measured_at, bytes_level = excluded.bytes_level, inodes_level = excluded.inodes_level
    RETURNING d.session_id, d.bytes_level, d.inodes_level
)
-- `b` is the row before this statement.
SELECT h.id, h.tenant_id, h.bytes AS "bytes!", h.inodes AS "inodes!", h.max_bytes AS "max_bytes!", h.max_inodes AS "max_inodes!",
       coalesce(b.bytes_level, 0::smallint) AS "bytes_before!", n.bytes_level AS "bytes_now!",
       coalesce(b.inodes_level, 0::smallint) AS "inodes_before!", n.inodes_level AS "inodes_now!"
FROM held h JOIN stored n ON n.session_id = h.id LEFT JOIN session_disk b ON b.session_id = h.id
