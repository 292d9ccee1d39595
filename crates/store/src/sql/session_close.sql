-- Closes a session. Waits for runs that are being inserted, and sees them (migrations/0003_sessions.sql).
SELECT c.has_queue AS "has_queue!",
       (c.session).spec AS "spec!: Json<SessionSpec>", (c.session).id AS "id!", (c.session).tenant_id AS "tenant_id!",
       (c.session).alias, (c.session).labels AS "labels!: Json<BTreeMap<String, String>>", (c.session).state AS "state!",
       (c.session).end_reason, (c.session).created_at AS "created_at!", (c.session).expires_at AS "expires_at!",
       (c.session).idle_ttl, (c.session).ended_at, (c.session).lease_epoch AS "lease_epoch!",
       (c.session).allow_data_loss AS "allow_data_loss!", (c.session).created_by,
       (c.session).quarantined_at, (c.session).quarantine_reason, (c.session).quarantine_run,
       (c.session).network AS "network: Json<NetworkPolicy>", w.id AS "holder?", w.address AS "holder_address?",
       NULL::bigint AS disk_bytes, NULL::bigint AS disk_inodes, NULL::text AS disk_mechanism,
       NULL::timestamptz AS disk_measured_at
FROM close_session($1, $2, $3, $4) c
LEFT JOIN workers w ON w.id = (c.session).lease_worker AND w.incarnation = (c.session).lease_incarnation
    AND w.lease_until > now()
