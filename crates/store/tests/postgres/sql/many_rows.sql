-- Fills the tables of version 18, without checking foreign keys.
SET session_replication_role = replica;
CREATE FUNCTION pg_temp.id_ago(ago interval) RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT (lpad(to_hex((extract(epoch FROM now() - ago) * 1000)::bigint), 12, '0') || '7'
            || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid
$$;
INSERT INTO sessions (id, tenant_id, spec, labels, expires_at, state, ended_at, end_reason, removed_at)
SELECT pg_temp.id_ago(n * interval '10 s'), 'a', jsonb_build_object('mode', 'logical', 'padding', repeat('x', 200)), '{}',
       now() + interval '1 day', v.state, v.at, v.reason, v.at
FROM generate_series(1, 60000) n,
     LATERAL (SELECT CASE WHEN n % 10 = 0 THEN 'open' ELSE 'ended' END AS state,
                     CASE WHEN n % 10 > 0 THEN now() END AS at, CASE WHEN n % 10 > 0 THEN 'closed' END AS reason) v;
INSERT INTO runs (id, tenant_id, session_id, spec, labels, retries, state, outcome, ended_at, output_bytes, idempotency_key,
                  request_hash)
SELECT pg_temp.id_ago(interval '1 hour' + row_number() OVER () * interval '1 s'), 'a', s.id,
       jsonb_build_object('mode', 'logical', 'padding', repeat('x', 300)),
       CASE WHEN n % 4 = 0 THEN '{"team": "a"}'::jsonb ELSE '{}' END, 0, v.state, v.outcome, v.at, 100 * (n % 2),
       CASE WHEN n % 4 = 1 THEN n::text END, CASE WHEN n % 4 = 1 THEN '\x00'::bytea END
FROM sessions s, generate_series(1, 4) n,
     LATERAL (SELECT CASE WHEN s.state = 'open' AND n = 1 AND hashtext(s.id::text) % 6 = 0 THEN 'queued'
                          ELSE 'ended' END AS state) q,
     LATERAL (SELECT q.state, CASE WHEN q.state = 'ended' THEN now() END AS at,
                     CASE WHEN q.state = 'ended' THEN '{"kind": "exited", "detail": 0}'::jsonb END AS outcome) v;
INSERT INTO run_output (run_id, position, stream, stream_offset, data)
SELECT id, 0, 1, 0, convert_to(repeat('x', 100), 'UTF8') FROM runs WHERE output_bytes > 0
ON CONFLICT DO NOTHING;
INSERT INTO events (id, kind, tenant_id, session_id, detail)
SELECT pg_temp.id_ago(n * interval '1 s'), 'RUN_REFUSED', 'a', gen_random_uuid(), '{}' FROM generate_series(1, 150000) n;
RESET session_replication_role;
