//! What each database role may do.

use codelia_tests::Database;
use sqlx::{AssertSqlSafe, Connection, PgConnection};

const TABLES: &str = "SELECT relname::text FROM pg_class
                      WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v') AND NOT relispartition";
const PRIVILEGES: &str = "SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER";

async fn migrated() -> Database {
    let database = Database::create().await.unwrap();
    let store = database.store().await.unwrap();
    store.migrate().await.unwrap();
    assert_eq!(store.roles_missing().await.unwrap(), Vec::<String>::new());
    store.close().await;
    database
}

/// The tables that `role` may use, each with its privileges.
async fn granted(database: &Database, role: &str) -> Vec<(String, String)> {
    let mut connection = database.connection().await.unwrap();
    let tables: Vec<String> = sqlx::query_scalar(TABLES).fetch_all(&mut connection).await.unwrap();
    let mut granted = Vec::new();
    for table in tables {
        let held: Option<String> = sqlx::query_scalar(
            "SELECT string_agg(p, ' ' ORDER BY p) FROM unnest(string_to_array($1, ', ')) AS p
             WHERE has_table_privilege($2, $3, p)",
        )
        .bind(PRIVILEGES)
        .bind(role)
        .bind(&table)
        .fetch_one(&mut connection)
        .await
        .unwrap();
        granted.extend(held.map(|held| (table, held)));
    }
    connection.close().await.unwrap();
    granted.sort();
    granted
}

fn owned(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|&(table, held)| (table.to_owned(), held.to_owned())).collect()
}

/// Whether `role` is denied this statement; the statement takes no effect.
async fn is_denied(connection: &mut PgConnection, role: &str, statement: &str) -> bool {
    let text = AssertSqlSafe(format!("BEGIN; SET LOCAL ROLE {role}; {statement}"));
    let result = sqlx::raw_sql(text).execute(&mut *connection).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await.unwrap();
    match result {
        Ok(_) => false,
        Err(error) => {
            let code = error.as_database_error().and_then(|error| error.code()).unwrap_or_default();
            assert_eq!(code, "42501", "{role}: {statement}: {error}");
            true
        }
    }
}

#[tokio::test]
async fn worker_and_auditor_hold_only_these_privileges() {
    let database = migrated().await;
    let worker = owned(&[
        ("_sqlx_migrations", "SELECT"),
        // And to insert and withdraw: see the columns.
        ("approvals", "SELECT"),
        ("audit", "INSERT"),
        ("audit_checkpoints", "INSERT"),
        ("ended_runs", "INSERT SELECT"),
        ("ending_sessions", "DELETE INSERT SELECT"),
        ("held_changes", "DELETE INSERT SELECT UPDATE"),
        ("live_runs", "DELETE INSERT SELECT UPDATE"),
        ("output_changes", "INSERT"),
        ("output_store", "SELECT"),
        ("run_output", "INSERT SELECT"),
        ("run_settings", "SELECT"),
        ("session_disk", "DELETE INSERT SELECT UPDATE"),
        ("sessions", "SELECT UPDATE"),
        ("upkeep_owner", "SELECT"),
        // And to update what it measures: see the columns.
        ("volume_mounts", "SELECT"),
        ("volumes", "SELECT"),
        ("waiting_sessions", "DELETE INSERT SELECT UPDATE"),
        ("workers", "INSERT SELECT UPDATE"),
    ]);
    assert_eq!(granted(&database, "codelia_worker").await, worker);
    let auditor = owned(&[
        ("approvals", "SELECT"),
        ("audit", "SELECT"),
        ("audit_checkpoints", "SELECT"),
        ("ended_runs", "SELECT"),
        ("flag_revisions", "SELECT"),
        ("flags", "SELECT"),
        ("policy_versions", "SELECT"),
        ("run_settings", "SELECT"),
        ("scope_policies", "SELECT"),
        ("tenant_policies", "SELECT"),
        ("tools", "SELECT"),
        ("volume_mounts", "SELECT"),
        ("volumes", "SELECT"),
    ]);
    assert_eq!(granted(&database, "codelia_auditor").await, auditor);
    for (table, held) in granted(&database, "codelia_api").await {
        let expected = match table.as_str() {
            "_sqlx_migrations" => "SELECT",
            "audit" | "audit_checkpoints" | "audit_default" => "INSERT SELECT",
            _ => "DELETE INSERT SELECT UPDATE",
        };
        assert_eq!(held, expected, "{table}");
    }
    database.end().await.unwrap();
}

#[tokio::test]
async fn roles_are_denied_what_they_do_not_need() {
    let database = migrated().await;
    let mut connection = database.connection().await.unwrap();
    let tomorrow = "SELECT create_run_partitions((now() AT TIME ZONE 'UTC')::date + 30)";
    let denied = [
        ("codelia_api", "ALTER TABLE tenants ADD COLUMN planted text"),
        ("codelia_api", "DROP TABLE ended_runs_default"),
        ("codelia_api", "CREATE TABLE planted ()"),
        ("codelia_api", "TRUNCATE sessions"),
        ("codelia_api", "DELETE FROM _sqlx_migrations"),
        ("codelia_api", "CREATE ROLE planted"),
        ("codelia_api", "UPDATE audit SET detail = 'planted'"),
        ("codelia_api", "DELETE FROM audit"),
        ("codelia_api", "DELETE FROM audit_default"),
        ("codelia_api", "TRUNCATE audit"),
        ("codelia_api", "UPDATE audit_checkpoints SET number = 1"),
        ("codelia_api", "DELETE FROM audit_checkpoints"),
        ("codelia_api", "ALTER TABLE audit DISABLE TRIGGER append_only"),
        ("codelia_worker", "SELECT detail FROM audit"),
        ("codelia_worker", "UPDATE audit SET detail = 'planted'"),
        ("codelia_worker", "DELETE FROM audit"),
        ("codelia_worker", "SELECT drop_audit_partition('2020-01-01')"),
        ("codelia_auditor", "INSERT INTO audit DEFAULT VALUES"),
        ("codelia_worker", "SELECT FROM api_keys"),
        ("codelia_worker", "SELECT FROM tenants"),
        ("codelia_worker", "SELECT FROM run_keys"),
        ("codelia_worker", "DELETE FROM ended_runs"),
        ("codelia_worker", "UPDATE ended_runs SET result = NULL"),
        ("codelia_worker", "INSERT INTO run_settings DEFAULT VALUES"),
        ("codelia_worker", "DELETE FROM sessions"),
        ("codelia_worker", "INSERT INTO sessions DEFAULT VALUES"),
        ("codelia_worker", "UPDATE upkeep_owner SET until = now()"),
        ("codelia_worker", "INSERT INTO output_removals VALUES ('planted')"),
        ("codelia_worker", "UPDATE output_store SET id = gen_random_uuid()"),
        ("codelia_worker", "UPDATE approvals SET decided_by = gen_random_uuid()"),
        ("codelia_worker", "UPDATE approvals SET scope = 'tenant'"),
        ("codelia_worker", "INSERT INTO approvals (state, scope) VALUES ('allowed', 'once')"),
        ("codelia_worker", "DELETE FROM approvals"),
        ("codelia_worker", "DELETE FROM run_output"),
        ("codelia_worker", "UPDATE flag_revisions SET rule = NULL"),
        ("codelia_worker", "UPDATE flags SET revision = 1"),
        ("codelia_worker", "SELECT reason FROM tenant_policies"),
        ("codelia_worker", "INSERT INTO tenant_policies (tenant_id) VALUES ('a')"),
        ("codelia_worker", "SELECT reason FROM scope_policies"),
        ("codelia_worker", "INSERT INTO scope_policies (tenant_id) VALUES ('a')"),
        ("codelia_worker", "DELETE FROM volumes"),
        ("codelia_worker", "UPDATE volumes SET tenant_id = 'planted'"),
        ("codelia_worker", tomorrow),
        ("codelia_auditor", "UPDATE approvals SET reason = 'planted'"),
        ("codelia_auditor", "SELECT FROM live_runs"),
        ("codelia_auditor", "SELECT FROM runs"),
        ("codelia_auditor", "SELECT FROM run_output"),
        ("codelia_auditor", "SELECT FROM api_keys"),
        ("codelia_auditor", "DELETE FROM audit"),
        ("codelia_auditor", "INSERT INTO audit DEFAULT VALUES"),
    ];
    for (role, statement) in denied {
        assert!(is_denied(&mut connection, role, statement).await, "{role} may: {statement}");
    }
    let allowed = [
        ("codelia_api", "SELECT FROM api_keys"),
        ("codelia_api", tomorrow),
        ("codelia_worker", "SELECT FROM live_runs"),
        ("codelia_worker", "UPDATE output_store SET location = 'file:///x'"),
        (
            "codelia_worker",
            "UPDATE approvals SET state = 'expired', decided_at = now(), changed_at = now()",
        ),
        ("codelia_worker", "SELECT lowest_isolation('a')"),
        ("codelia_worker", "SELECT retry_run(gen_random_uuid(), 'w', gen_random_uuid(), 1)"),
        (
            "codelia_worker",
            "UPDATE flag_revisions SET runs = runs + 1 WHERE flag_id = 'x' AND revision = 1",
        ),
        ("codelia_worker", "SELECT version, policy FROM tenant_policies WHERE tenant_id = 'a'"),
        ("codelia_auditor", "SELECT FROM approvals"),
        ("codelia_auditor", "SELECT FROM audit"),
        ("codelia_auditor", "SELECT FROM ended_runs"),
    ];
    for (role, statement) in allowed {
        assert!(
            !is_denied(&mut connection, role, statement).await,
            "the control: {role}: {statement}"
        );
    }
    connection.close().await.unwrap();
    database.end().await.unwrap();
}
