-- What: each beginning of a run has a number.
-- Why:  a hand-back that was given up and is executed late must not undo a later beginning.
-- Lock: ACCESS EXCLUSIVE on runs for a moment; a constant default rewrites nothing.

ALTER TABLE runs ADD COLUMN turn integer NOT NULL DEFAULT 0 CHECK (turn >= 0);
