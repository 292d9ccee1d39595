-- A few rows that the first migration and all later ones accept.
INSERT INTO tenants (id, quota_sessions, quota_concurrent_runs, quota_queued_runs, quota_requests_per_second, quota_output_bytes)
VALUES ('a', 1000, 1000, 1000, 1000, 1000000);
INSERT INTO api_keys (id, tenant_id, display_name, secret_hash, scopes)
VALUES (gen_random_uuid(), 'a', 'key', decode(repeat('00', 32), 'hex'), '{run}');
INSERT INTO sessions (id, tenant_id, spec, labels, expires_at)
SELECT gen_random_uuid(), 'a', '{"mode": "logical"}', '{}', now() + interval '1 day' FROM generate_series(1, 10);
INSERT INTO runs (id, tenant_id, session_id, spec, labels, retries, state, outcome, ended_at)
SELECT gen_random_uuid(), 'a', id, '{"mode": "logical"}', '{}', 0, 'ended', '{"kind": "exited", "detail": 0}', now() FROM sessions;
INSERT INTO run_output (run_id, position, stream, stream_offset, data) SELECT id, 0, 1, 0, 'output' FROM runs;
