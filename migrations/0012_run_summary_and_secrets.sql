-- What: what a listing shows of a run's spec; the encrypted variables of a run that has not ended.
-- Why:  a listing must not read a spec, which may have a megabyte; a secret must not outlive its run.
-- Lock: ACCESS EXCLUSIVE on runs while the rows are checked; columns without a default rewrite nothing.

ALTER TABLE runs
    -- Null for runs of earlier versions.
    ADD COLUMN summary jsonb,
    ADD COLUMN secret_env bytea,
    -- Every statement that ends a run must erase them.
    ADD CHECK (state <> 'ended' OR secret_env IS NULL);

-- Encrypted data does not shrink.
ALTER TABLE runs ALTER COLUMN secret_env SET STORAGE EXTERNAL;
