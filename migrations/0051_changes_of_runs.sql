-- What: what a transactional run changed in its workspace, and whether that was applied.
-- Why:  the row decides: a worker that finds prepared changes of a run applies them only if its row says so.
-- Lock: ACCESS EXCLUSIVE on ended_runs and its partitions for a moment; a new column without a default rewrites
--       nothing. Restart all processes before the first transactional run: earlier workers would execute it like
--       any other.

ALTER TABLE ended_runs ADD COLUMN changes jsonb;
