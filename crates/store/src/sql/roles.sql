-- Creates the group roles, if this user may, and grants each what it needs. Runs after the migrations, so that new
-- tables are included; repeating it changes nothing. Queries reach partitions through their parents, so partitions that
-- are made later need no grant.
DO $$
DECLARE
    schema text := current_schema();
    role   text;
    grants text[] := ARRAY[
        'SELECT ON _sqlx_migrations TO codelia_api, codelia_worker',
        'SELECT, INSERT, UPDATE ON workers TO codelia_worker',
        'SELECT, UPDATE ON sessions TO codelia_worker',
        'SELECT, INSERT, UPDATE, DELETE ON session_disk TO codelia_worker',
        'SELECT ON run_settings TO codelia_worker, codelia_auditor',
        'SELECT, INSERT, UPDATE, DELETE ON live_runs, waiting_sessions TO codelia_worker',
        'SELECT, INSERT, DELETE ON ending_sessions TO codelia_worker',
        'SELECT ON upkeep_owner TO codelia_worker',
        'SELECT, INSERT ON ended_runs, run_output TO codelia_worker',
        -- A worker decides about the changes that it holds.
        'UPDATE (changes) ON ended_runs TO codelia_worker',
        'SELECT, INSERT, UPDATE, DELETE ON held_changes TO codelia_worker',
        'INSERT ON output_changes TO codelia_worker',
        -- A worker adds to the audit, and reads which of its rows are stored.
        'INSERT, SELECT (writer, id) ON audit TO codelia_worker',
        'INSERT, SELECT (writer, number, at) ON audit_checkpoints TO codelia_worker',
        -- A worker requests and withdraws; the constraints of the table make an allowed row impossible with these columns.
        'SELECT, INSERT (id, tenant_id, session_id, run_id, kind, host, port, path, pid, exe, cwd, requested_by, message, '
            'expires_at), '
            'UPDATE (state, decided_at, changed_at, reason) ON approvals TO codelia_worker',
        'SELECT, UPDATE (location) ON output_store TO codelia_worker',
        -- A worker adds what happened under a flag, and cannot change the flag.
        'SELECT (flag_id, revision, runs, refused_runs, failed_runs, setups, sessions, refused_sessions), '
            'UPDATE (runs, refused_runs, failed_runs, setups, sessions, refused_sessions) ON flag_revisions TO codelia_worker',
        'SELECT (tenant_id, version, policy) ON tenant_policies TO codelia_worker',
        'SELECT (tenant_id, scope, name, version, policy) ON scope_policies TO codelia_worker',
        'SELECT (tenant_id, id, version, quarantine_reason, approved_version) ON tools TO codelia_worker',
        'SELECT ON volumes, volume_mounts TO codelia_worker',
        -- A worker records where a volume is, its size and its use.
        'UPDATE (root_id, used_at, used_bytes) ON volumes TO codelia_worker',
        -- The records of runs and what was refused or decided: neither output nor secrets nor keys.
        'SELECT ON audit, audit_checkpoints, ended_runs, approvals, flags, flag_revisions, tenant_policies, '
            'scope_policies, policy_versions, tools, volumes, volume_mounts '
            'TO codelia_auditor'
    ];
    found  record;
    one    text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('codelia roles'));
    FOREACH role IN ARRAY ARRAY['codelia_api', 'codelia_worker', 'codelia_auditor', 'codelia_migrator'] LOOP
        IF to_regrole(role) IS NULL AND (SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                -- Another database of this server was migrated at the same time.
            END;
        END IF;
    END LOOP;
    IF to_regrole('codelia_api') IS NULL OR to_regrole('codelia_worker') IS NULL OR to_regrole('codelia_auditor') IS NULL
       OR NOT pg_has_role((SELECT relowner FROM pg_class WHERE oid = 'tenants'::regclass), 'USAGE') THEN
        RETURN;
    END IF;

    -- The api serves every call and does the upkeep: all rows, but no table.
    FOR found IN
        SELECT relname FROM pg_class
        WHERE relnamespace = schema::regnamespace AND relkind IN ('r', 'p', 'v') AND pg_has_role(relowner, 'USAGE')
          AND (NOT relispartition OR relname LIKE '%\_default') AND relname <> '_sqlx_migrations'
    LOOP
        EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON %I TO codelia_api', found.relname);
    END LOOP;
    FOREACH one IN ARRAY grants LOOP
        EXECUTE 'GRANT ' || one;
    END LOOP;

    -- Nobody who serves calls changes the audit.
    REVOKE UPDATE, DELETE, TRUNCATE ON audit, audit_default, audit_checkpoints FROM codelia_api, codelia_worker;

    -- Only the owner of a table may add and drop its partitions. These functions check what they are asked for.
    FOREACH one IN ARRAY ARRAY['create_run_partitions(date)', 'drop_run_partition(text, date)',
                               'create_audit_partition(date)', 'drop_audit_partition(date)'] LOOP
        IF to_regprocedure(one) IS NOT NULL THEN
            EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', one, schema);
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', one);
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO codelia_api', one);
        END IF;
    END LOOP;

    -- Acts for a worker, with what its events say. It is a trigger and cannot be called.
    IF to_regprocedure('respond_to_escape()') IS NOT NULL THEN
        EXECUTE format('ALTER FUNCTION respond_to_escape() SECURITY DEFINER SET search_path = %I, pg_temp', schema);
    END IF;

    -- A worker may delete output only of a run that it hands back, read only this of a tenant, and quarantine tools.
    FOREACH one IN ARRAY ARRAY['retry_run(uuid, text, uuid, bigint)', 'lowest_isolation(text)', 'tenant_disk(text)',
                               'quarantine_tool(text, text, text, uuid, uuid)'] LOOP
        IF to_regprocedure(one) IS NOT NULL THEN
            EXECUTE format('ALTER FUNCTION %s SECURITY DEFINER SET search_path = %I, pg_temp', one, schema);
            EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', one);
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO codelia_api, codelia_worker', one);
        END IF;
    END LOOP;
END $$;
