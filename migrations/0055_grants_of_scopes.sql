-- What: decisions that hold for a project or a user, and the process that asks for a file.
-- Why:  a decision about a file can be kept where policies are: for the organisation, a project or a user.
-- Lock: ACCESS EXCLUSIVE on approvals for a moment; the table is small. Earlier programs cannot read a decision with a
--       new scope: update all apis before the first one.

ALTER TABLE approvals
    -- Whom a decision with the scope `project` or `user` holds for: the name of the project, or the id of the key.
    ADD COLUMN subject text CHECK (octet_length(subject) BETWEEN 1 AND 63),
    -- The process that asks for a file, as it is seen in its sandbox. 0 and empty if it is not known.
    ADD COLUMN pid integer NOT NULL DEFAULT 0 CHECK (pid >= 0),
    ADD COLUMN exe text NOT NULL DEFAULT '' CHECK (octet_length(exe) <= 1024),
    ADD COLUMN cwd text NOT NULL DEFAULT '' CHECK (octet_length(cwd) <= 1024),
    DROP CONSTRAINT approvals_scope_check,
    ADD CONSTRAINT approvals_scope_check CHECK (scope IN ('once', 'session', 'user', 'project', 'tenant')),
    ADD CONSTRAINT approvals_subject_of_scope_check CHECK ((coalesce(scope, '') IN ('user', 'project')) = (subject IS NOT NULL));

-- Whether the policies above a scope leave the field to it: that of the organisation, and for a user in a project also
-- that of the project.
CREATE FUNCTION scope_delegates(tenant text, in_scope text, in_project text, field text) RETURNS boolean
    LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT policy -> 'delegate' ? field FROM tenant_policies WHERE tenant_id = tenant
                     ORDER BY version DESC LIMIT 1), false)
       AND (in_scope <> 'user' OR in_project IS NULL
            OR coalesce((SELECT policy -> 'delegate' ? field FROM scope_policies
                         WHERE tenant_id = tenant AND scope = 'project' AND name = in_project
                         ORDER BY version DESC LIMIT 1), false))
$$;

-- Whether a decision that was made for one session holds for another of its tenant. One for a project or user holds as
-- long as the field is delegated.
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
