-- What: what runs have in common (mode, limits, policy, …) in a table of its own; live and ended runs refer to it.
-- Why:  most runs of a session, and of a tenant, have equal settings. A row without them is a third of the size.
-- Lock: ACCESS EXCLUSIVE on live_runs, ended_runs and its partitions for a moment; new columns without a default rewrite
--       nothing. Restart all processes: earlier programs cannot read runs that refer to settings.

CREATE TABLE run_settings (
    -- SHA-256 of the settings as their writer serialized them.
    hash     bytea PRIMARY KEY CHECK (octet_length(hash) = 32),
    settings jsonb NOT NULL,
    -- Not before the day of any run that refers to it: such a run is in the partition of that day or a later one, is
    -- live, or is in the default partition.
    used_day date NOT NULL
);
CREATE INDEX run_settings_by_day ON run_settings (used_day);

-- The rest of the run's spec is then in run_settings, and the spec has the command only.
ALTER TABLE live_runs ADD COLUMN settings_hash bytea;
ALTER TABLE ended_runs ADD COLUMN settings_hash bytea;

CREATE OR REPLACE VIEW runs AS
SELECT id, tenant_id, session_id,
       spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = settings_hash), '{}') AS spec,
       summary, labels, attempt, state, cancel_requested_at, cancel_reason,
       worker_id, incarnation, lease_epoch, NULL::text AS sandbox_root, created_at, NULL::timestamptz AS started_at,
       NULL::timestamptz AS ended_at, NULL::bigint AS setup_micros, NULL::boolean AS prepared,
       NULL::text[] AS unenforced, NULL::text[] AS watched, NULL::jsonb AS outcome, NULL::integer AS exit_code,
       NULL::jsonb AS usage, NULL::jsonb AS receipt, 0::bigint AS output_bytes, false AS output_truncated,
       NULL::bigint AS output_total, NULL::jsonb AS violations, secret_env
FROM live_runs
UNION ALL
SELECT id, tenant_id, session_id,
       spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = settings_hash), '{}'),
       summary, labels, attempt, 'ended', cancel_requested_at, cancel_reason,
       worker_id, incarnation, lease_epoch, sandbox_root, created_at, started_at,
       ended_at, setup_micros, prepared,
       unenforced, watched, outcome, exit_code,
       usage, receipt, output_bytes, output_truncated,
       output_total, violations, NULL
FROM ended_runs;
