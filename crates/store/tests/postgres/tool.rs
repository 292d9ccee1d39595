//! Tools: versions, approvals and quarantines.

use codelia_policy::{IsolationLevel, RunTool, ToolDeclaration};
use codelia_store::{EventKind, MAX_TOOLS, Tool, ToolChange, ToolNotChanged, ToolWithdrawn};
use codelia_tests::recorded_events;
use codelia_types::{KeyId, ToolId};

use crate::harness::Fixture;

fn declaration(level: Option<IsolationLevel>) -> ToolDeclaration {
    let mut declaration = ToolDeclaration {
        owner: "me".into(),
        executables: vec!["sh".into()],
        ..ToolDeclaration::default()
    };
    declaration.policy.isolation_level = level;
    declaration
}

const LEVEL_0: Option<IsolationLevel> = Some(IsolationLevel::None);

impl Fixture {
    fn change<'a>(&'a self, id: &'a ToolId) -> ToolChange<'a> {
        ToolChange { tenant: &self.tenant, id, key: KeyId::generate() }
    }

    async fn register_tool(
        &self,
        id: &ToolId,
        level: Option<IsolationLevel>,
        expected: Option<i64>,
    ) -> Result<Tool, ToolNotChanged> {
        self.store.tool_register(self.change(id), &declaration(level), expected).await.unwrap()
    }

    async fn tools_version(&self) -> i64 {
        self.database.number("SELECT sum(tools_version)::bigint FROM tenants").await.unwrap()
    }

    async fn events_of(&self, kind: EventKind) -> usize {
        recorded_events(&self.store, &self.tenant, Some(kind)).await.unwrap().len()
    }
}

#[tokio::test]
async fn changed_declaration_needs_expected_version_and_new_approval() {
    let fixture = Fixture::new().await;
    let id: ToolId = "fmt".parse().unwrap();
    let created = fixture.register_tool(&id, LEVEL_0, Some(0)).await.unwrap();
    assert_eq!((created.version, created.is_approved()), (1, false));
    assert_eq!(fixture.register_tool(&id, LEVEL_0, Some(0)).await, Err(ToolNotChanged::Version(1)));
    let before = fixture.tools_version().await;
    assert_eq!(
        fixture.register_tool(&id, LEVEL_0, None).await.unwrap().version,
        1,
        "nothing changed"
    );
    assert_eq!(fixture.tools_version().await, before);

    let approve =
        |version, level| fixture.store.tool_approve(fixture.change(&id), version, level, "checked");
    let wrong = approve(1, IsolationLevel::Process).await.unwrap();
    assert_eq!(wrong, Err(ToolNotChanged::Level(IsolationLevel::None)));
    assert_eq!(approve(2, IsolationLevel::None).await.unwrap(), Err(ToolNotChanged::Version(1)));
    let approved = approve(1, IsolationLevel::None).await.unwrap().unwrap();
    assert!(approved.is_approved() && approved.approval.unwrap().reason == "checked");
    assert!(fixture.tools_version().await > before, "copies are outdated");
    assert!(!approve(1, IsolationLevel::Full).await.unwrap().unwrap().is_approved(), "withdrawn");
    approve(1, IsolationLevel::None).await.unwrap().unwrap();

    let mut changed = declaration(LEVEL_0);
    changed.executables.push("bash".into());
    let changed =
        fixture.store.tool_register(fixture.change(&id), &changed, Some(1)).await.unwrap().unwrap();
    assert_eq!(
        (changed.version, changed.is_approved()),
        (2, false),
        "an approval is for one version"
    );
    assert_eq!(fixture.events_of(EventKind::ToolRegistered).await, 2);
    assert_eq!(fixture.events_of(EventKind::ToolLevelApproved).await, 3);
    fixture.end().await;
}

#[tokio::test]
async fn quarantine_stays_until_released() {
    let fixture = Fixture::new().await;
    let id: ToolId = "fmt".parse().unwrap();
    let store = &fixture.store;
    let missing = store.tool_quarantine(fixture.change(&id), "x").await.unwrap();
    assert_eq!(missing, Err(ToolNotChanged::NotFound));
    fixture.register_tool(&id, None, None).await.unwrap();
    let before = fixture.tools_version().await;
    let first = store.tool_quarantine(fixture.change(&id), "first").await.unwrap().unwrap();
    assert!(first.quarantine.is_some() && fixture.tools_version().await > before);
    let second = store.tool_quarantine(fixture.change(&id), "second").await.unwrap().unwrap();
    assert_eq!(second.quarantine, first.quarantine, "the first reason is kept");
    let changed = fixture.register_tool(&id, LEVEL_0, None).await.unwrap();
    assert_eq!(changed.quarantine, first.quarantine, "another version does not help");
    let deleted = store.tool_delete(fixture.change(&id)).await.unwrap();
    assert_eq!(deleted, Err(ToolNotChanged::Quarantined("first".into())));
    let released = store.tool_release(fixture.change(&id), "fixed").await.unwrap().unwrap();
    assert_eq!(released.quarantine, None);
    assert_eq!(store.tool_delete(fixture.change(&id)).await.unwrap(), Ok(()));
    assert_eq!(store.tool_get(&fixture.tenant, &id).await.unwrap(), None);
    for kind in [EventKind::ToolQuarantined, EventKind::ToolReleased, EventKind::ToolDeleted] {
        assert_eq!(fixture.events_of(kind).await, 1, "{kind:?}");
    }
    fixture.end().await;
}

#[tokio::test]
async fn waiting_run_learns_what_happened_to_its_tool() {
    let fixture = Fixture::new().await;
    let id: ToolId = "fmt".parse().unwrap();
    let worker = fixture.worker("w").await;
    let session = fixture.session().await;
    let run = fixture.insert(session.id, 0).await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let assigned = fixture.store.run_begin(run, &lease.token).await.unwrap().unwrap();
    let named = RunTool { id: id.clone(), version: 1, level: IsolationLevel::None };
    let withdrawn = || async { fixture.store.tool_withdrawn(&assigned, &named).await.unwrap() };
    assert_eq!(withdrawn().await, Some(ToolWithdrawn::Changed), "there is none");
    fixture.register_tool(&id, LEVEL_0, None).await.unwrap();
    assert_eq!(withdrawn().await, Some(ToolWithdrawn::NotApproved));
    let level = IsolationLevel::None;
    fixture.store.tool_approve(fixture.change(&id), 1, level, "ok").await.unwrap().unwrap();
    assert_eq!(withdrawn().await, None);
    fixture.store.tool_quarantine(fixture.change(&id), "bad").await.unwrap().unwrap();
    assert_eq!(withdrawn().await, Some(ToolWithdrawn::Quarantined("bad".into())));
    fixture.end().await;
}

#[tokio::test]
async fn tenant_has_a_bounded_number_of_tools() {
    let fixture = Fixture::new().await;
    let fill = format!(
        "INSERT INTO tools (tenant_id, id, version, declaration, level, key_id)
         SELECT '{}', 'tool-' || n, 1, '{{}}', 'LEVEL_2', gen_random_uuid() FROM generate_series(1, {}) n",
        fixture.tenant,
        MAX_TOOLS - 1,
    );
    fixture.database.execute(&fill).await.unwrap();
    let ids: [ToolId; 2] = ["first".parse().unwrap(), "second".parse().unwrap()];
    fixture.register_tool(&ids[0], None, None).await.unwrap();
    assert_eq!(fixture.register_tool(&ids[1], None, None).await, Err(ToolNotChanged::TooMany));
    fixture.register_tool(&ids[0], LEVEL_0, None).await.unwrap();
    fixture.end().await;
}
