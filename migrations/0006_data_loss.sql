-- What: whether a session whose files are gone may start again empty.
-- Why:  only its caller can tell whether an empty directory is better than none.
-- Lock: ACCESS EXCLUSIVE on sessions for a moment; a constant default rewrites nothing.

ALTER TABLE sessions ADD COLUMN allow_data_loss boolean NOT NULL DEFAULT false;
