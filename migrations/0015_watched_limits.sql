-- What: the limits of a run that were only watched; the modes in which a worker only watches limits.
-- Why:  with best effort, callers and operators must see that a limit was not enforced.
-- Lock: ACCESS EXCLUSIVE on runs and workers for a moment; the columns rewrite nothing.

ALTER TABLE runs
    -- Null before the end, and for runs of earlier versions.
    ADD COLUMN watched text[];

ALTER TABLE workers
    ADD COLUMN watched_modes text[] NOT NULL DEFAULT '{}';
