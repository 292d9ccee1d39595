-- What: what each worker announces that it can do, and what a run needs of its worker.
-- Why:  a worker of an earlier version ignores options of a run that it does not know: it would execute a transactional
--       run like any other, and drop changes that wait for a decision. The database keeps both from it, since its
--       statements cannot be changed any more.
-- Lock: ACCESS EXCLUSIVE on workers, live_runs and sessions for a moment; constant defaults rewrite nothing.

ALTER TABLE workers
    ADD COLUMN features text[] NOT NULL DEFAULT '{}',
    -- The incarnation that announced them: an earlier version leaves both columns as they are when it registers.
    ADD COLUMN features_of uuid;

-- Null if any worker will do.
ALTER TABLE live_runs ADD COLUMN needs text[];

CREATE FUNCTION worker_has(worker text, of_incarnation uuid, needs text[]) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT EXISTS (SELECT 1 FROM workers w WHERE w.id = worker AND w.features_of = of_incarnation AND needs <@ w.features)
$$;

-- The statement of a worker that lacks what the run needs changes no row: the run stays queued.
CREATE FUNCTION check_features_of_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF worker_has(NEW.worker_id, NEW.incarnation, NEW.needs) THEN
        RETURN NEW;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER check_features BEFORE UPDATE OF state ON live_runs FOR EACH ROW
    WHEN (NEW.state = 'running' AND NEW.needs IS NOT NULL) EXECUTE FUNCTION check_features_of_run();

-- The same for a session that holds changes.
CREATE FUNCTION check_features_of_session() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT 1 FROM held_changes WHERE session_id = NEW.id)
       AND NOT worker_has(NEW.lease_worker, NEW.lease_incarnation, '{held_changes}') THEN
        RETURN NULL;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_features BEFORE UPDATE OF lease_epoch ON sessions FOR EACH ROW
    WHEN (NEW.lease_worker IS NOT NULL) EXECUTE FUNCTION check_features_of_session();
