-- Approvals: requests that a person decides about. A wider network, less isolation or a file of the host
-- needs a decision; a run that waits for one is in the state `held`, in no index range that workers read.

CREATE TABLE approvals (
    id            uuid PRIMARY KEY,
    tenant_id     text NOT NULL REFERENCES tenants (id),
    -- The session and the run that it was requested for. They may be deleted before a grant to the tenant.
    session_id    uuid NOT NULL,
    run_id        uuid,

    -- What is requested, such as network_host. Programs know the kinds; see store/src/approval.
    kind          text NOT NULL CHECK (kind ~ '^[a-z][a-z_]{0,62}$'),
    -- The host and port that it is about; empty and 0 if the kind has none.
    host          text NOT NULL CHECK (octet_length(host) <= 255),
    port          integer NOT NULL CHECK (port BETWEEN 0 AND 65535),
    -- The file of the host that it is about; empty if the kind has none. Bounded, because indexes have it.
    path          text NOT NULL DEFAULT '' CHECK (octet_length(path) <= 1024),
    -- The process that asks for a file, as it is seen in its sandbox. 0 and empty if it is not known.
    pid           integer NOT NULL DEFAULT 0 CHECK (pid >= 0),
    exe           text NOT NULL DEFAULT '' CHECK (octet_length(exe) <= 1024),
    cwd           text NOT NULL DEFAULT '' CHECK (octet_length(cwd) <= 1024),
    -- The key that started the run. It may not decide.
    requested_by  uuid NOT NULL,
    -- For the person who decides.
    message       text NOT NULL CHECK (octet_length(message) BETWEEN 1 AND 1000),
    created_at    timestamptz NOT NULL DEFAULT now(),
    -- A pending one has expired from here on, whether or not a sweep recorded it.
    expires_at    timestamptz NOT NULL,

    state         text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'allowed', 'denied', 'expired')),
    -- What a decision holds for.
    scope         text CHECK (scope IN ('once', 'session', 'user', 'project', 'tenant')),
    -- Whom a decision with the scope `project` or `user` holds for: the name of the project, or the id of
    -- the key.
    subject       text CHECK (octet_length(subject) BETWEEN 1 AND 63),
    -- The file, or all files below its directory. Null unless it is decided and has a path.
    reach         text CHECK (reach IN ('file', 'directory')),
    -- Null if nobody decided.
    decided_by    uuid,
    decided_at    timestamptz,
    reason        text CHECK (octet_length(reason) BETWEEN 1 AND 1000),
    revoked_by    uuid,
    revoked_at    timestamptz,
    revoke_reason text CHECK (octet_length(revoke_reason) BETWEEN 1 AND 1000),
    -- When the row changed last.
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),

    CHECK ((state = 'pending') = (decided_at IS NULL)),
    CHECK ((state = 'allowed') = (scope IS NOT NULL)),
    CHECK ((coalesce(scope, '') IN ('user', 'project')) = (subject IS NOT NULL)),
    CHECK ((state IN ('allowed', 'denied')) = (decided_by IS NOT NULL)),
    CHECK (decided_by <> requested_by),
    CHECK (reach IS NULL OR (path <> '' AND state IN ('allowed', 'denied'))),
    CHECK (revoked_at IS NULL OR state = 'allowed'),
    CHECK ((revoked_at IS NULL) = (revoked_by IS NULL))
);
CREATE INDEX approvals_by_tenant ON approvals (tenant_id, id);
CREATE INDEX approvals_by_change ON approvals (tenant_id, changed_at);
CREATE INDEX approvals_by_run ON approvals (run_id, kind, host, port, path, id);
CREATE INDEX approvals_pending ON approvals (tenant_id, id) WHERE state = 'pending';
CREATE INDEX approvals_pending_by_deadline ON approvals (expires_at) WHERE state = 'pending';
CREATE UNIQUE INDEX approvals_pending_of_run ON approvals (run_id, kind, host, port, path) WHERE state = 'pending';
-- Grants: what holds for later runs, too.
CREATE INDEX approvals_granted ON approvals (tenant_id, kind, host, port, path)
    WHERE state = 'allowed' AND scope <> 'once' AND revoked_at IS NULL;

-- Whether a decision that was made for one session holds for another of its tenant. One for a project or
-- user holds as long as the field is delegated.
CREATE FUNCTION grant_holds(a approvals, in_session uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT CASE a.scope
        WHEN 'tenant' THEN true
        WHEN 'session' THEN a.session_id = in_session
        WHEN 'once' THEN false
        ELSE EXISTS (
            SELECT 1 FROM sessions s
            WHERE s.id = in_session AND s.tenant_id = a.tenant_id
              AND a.subject = CASE a.scope WHEN 'user' THEN s.created_by::text ELSE s.spec #>> '{scopes,project}' END
              AND scope_delegates(a.tenant_id, a.scope, s.spec #>> '{scopes,project}', 'filesystem.read_only_paths'))
    END
$$;
