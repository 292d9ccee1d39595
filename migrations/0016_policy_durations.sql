-- What: stored policies name times and the CPU rate as documents do now.
-- Why:  a policy with a field of another name cannot be read; milliseconds become text with a unit.
-- Lock: ROW EXCLUSIVE on sessions and runs; reads both once, writes only rows that have such a field.

CREATE FUNCTION pg_temp.renamed(resources jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_object_agg(
        CASE key
            WHEN 'max_cpu_ms' THEN 'max_cpu_time'
            WHEN 'max_wall_ms' THEN 'max_wall_time'
            WHEN 'release_interval_ms' THEN 'release_interval'
            WHEN 'max_cpu_millis' THEN 'max_cpu_millicores'
            ELSE key
        END,
        CASE WHEN key IN ('max_cpu_ms', 'max_wall_ms', 'release_interval_ms')
            THEN to_jsonb(value #>> '{}' || 'ms')
            ELSE value
        END)
    FROM jsonb_each(resources)
$$;

UPDATE sessions SET spec = jsonb_set(spec, '{policy,resources}', pg_temp.renamed(spec #> '{policy,resources}'))
WHERE spec #> '{policy,resources}' ?| ARRAY['max_cpu_ms', 'max_wall_ms', 'release_interval_ms', 'max_cpu_millis'];

UPDATE runs SET spec = jsonb_set(spec, '{policy,resources}', pg_temp.renamed(spec #> '{policy,resources}'))
WHERE spec #> '{policy,resources}' ?| ARRAY['max_cpu_ms', 'max_wall_ms', 'release_interval_ms', 'max_cpu_millis'];
