-- Queues a run again that its worker has not started, or cancels it if its session takes no runs any more or a caller
-- requested it. The locks come first: whether a caller requested it decides which of the two statements applies, and a
-- statement that waited for a lock would not look at that again.
WITH session AS (
    SELECT s.id, s.state = 'open' AND s.quarantined_at IS NULL AS open, w.id IS NULL AS waits,
           CASE WHEN w.id IS NULL THEN s.spec ->> 'mode' END AS mode, s.home_root, s.allow_data_loss
    FROM live_runs r JOIN sessions s ON s.id = r.session_id
    LEFT JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation AND w.lease_until > now()
    WHERE r.id = $1
    -- The end of the session and a change of its lease wait until this run is visible as queued.
    FOR SHARE OF s
),
run AS (
    SELECT r.id, session.open AND r.cancel_requested_at IS NULL AS goes_on
    FROM session JOIN live_runs r ON r.id = $1
    WHERE r.state = 'running' AND r.worker_id = $2 AND r.incarnation = $3 AND r.turn = $4
    FOR UPDATE OF r
),
queued AS (
    UPDATE live_runs r SET state = 'queued', worker_id = NULL, incarnation = NULL, lease_epoch = NULL
    FROM run WHERE r.id = run.id AND run.goes_on
    RETURNING r.session_id, r.tenant_id
),
canceled AS (
    DELETE FROM live_runs r USING run WHERE r.id = run.id AND NOT run.goes_on
    RETURNING r.*
),
ended AS (
    INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
                            created_at, ended_at, result)
    SELECT id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, cancel_requested_at, cancel_reason,
           created_at, now(), '{"outcome": {"kind": "canceled"}}'
    FROM canceled
),
audited AS (
    INSERT INTO audit (writer, id, at, kind, tenant_id, session_id, run_id, detail, mac)
    SELECT $5, $6, $7, 'RUN_ENDED', tenant_id, session_id, id, $8, $9 FROM canceled
),
waiting AS (
    INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
    SELECT session.id, queued.tenant_id, session.mode,
           coalesce(session.home_root, '00000000-0000-0000-0000-000000000000'), session.allow_data_loss
    FROM queued, session WHERE session.waits
    ON CONFLICT (session_id) DO NOTHING
)
SELECT (SELECT count(*) FROM queued) AS "queued!", (SELECT count(*) FROM canceled) AS "canceled!"
