-- Chunks of the run $2 from the position $3 on, until they hold $4 bytes.
SELECT position AS "position!", stream AS "stream!", stream_offset AS "stream_offset!",
       data, object, object_offset, length FROM (
    SELECT s.*, sum(s.size) OVER (ORDER BY s.position) - s.size AS before
    FROM (SELECT *, coalesce(length, octet_length(data)) AS size FROM run_output WHERE run_id = $2) AS s
    WHERE (EXISTS (SELECT 1 FROM live_runs WHERE id = $2 AND tenant_id || '' = $1)
           OR EXISTS (SELECT 1 FROM ended_runs WHERE id = $2 AND tenant_id || '' = $1))
      -- No chunk is longer, so this includes the chunk at the position.
      AND s.position > $3::bigint - $6::bigint
      AND s.position + s.size > $3
    ORDER BY s.position LIMIT $5
) AS found
WHERE before < $4
ORDER BY position
