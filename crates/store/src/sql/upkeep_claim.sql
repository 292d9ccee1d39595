-- Claims or renews the ownership of the upkeep for $2. The owner stores what it counted.
WITH former AS (
    SELECT until FROM upkeep_owner
),
claimed AS (
    UPDATE upkeep_owner SET holder = $1, until = now() + $2, queue_depth = coalesce($3, queue_depth),
        queue_oldest_at = CASE WHEN $3::bigint IS NULL THEN queue_oldest_at ELSE $4 END,
        -- See root_is_gone.
        watching_since = CASE WHEN until <= now() - interval '30 seconds' OR watching_since > now()
                              THEN now() ELSE watching_since END
    -- No claim lasts longer than $2: one that seems to is from before the clock was set back.
    WHERE holder = $1 OR until <= now() OR until > now() + 2 * $2::interval
    RETURNING until, queue_depth, queue_oldest_at
)
SELECT claimed.until IS NOT NULL AS "is_owner!",
       (SELECT until > now() + 2 * $2::interval FROM former) AS "is_set_back!",
       coalesce(claimed.queue_depth, o.queue_depth) AS "queue_depth!",
       coalesce(greatest(now() - CASE WHEN claimed.until IS NULL THEN o.queue_oldest_at
                                      ELSE claimed.queue_oldest_at END, interval '0'),
                interval '0') AS "queue_age!",
       greatest(coalesce(claimed.until, o.until) - now(), interval '0') AS "expires_in!"
FROM upkeep_owner o LEFT JOIN claimed ON true
