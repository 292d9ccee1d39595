-- What: how much output a command wrote.
-- Why:  output after the limit is not stored, but a caller that received all of it must be able to know.
-- Lock: ACCESS EXCLUSIVE on runs for a moment; a column without a default rewrites nothing.

-- Null for runs that have not ended, were lost, or are of earlier versions.
ALTER TABLE runs ADD COLUMN output_total bigint CHECK (output_total >= output_bytes);
