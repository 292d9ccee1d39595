//! What an operator must permit and a person must allow: the host's network for each run, and less
//! isolation than the tenant's floor.

use std::{
    fs,
    io::Write,
    net::TcpListener,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    outcome::Kind::{self, Exited},
    *,
};
use codelia_store::{EventKind, Scope};
use codelia_tests::{
    Client, Cluster, Exec, RecordedEvent, Scratch, command, recorded_events, refusal, shell,
};
use serde_json::Value;
use tonic::Status;

use crate::isolation::isolating_with;

/// An installation with a caller and a person who decides.
struct Setup {
    cluster: Cluster,
    caller: Client,
    decider: Client,
}

impl Setup {
    /// Starts it in a mode under a policy, or returns `None` if the mode does not work here.
    async fn under(mode: &'static str, policy: &str) -> Result<Option<Self>> {
        Self::start(mode, policy, Vec::new()).await
    }

    async fn start(
        mode: &'static str,
        policy: &str,
        mut settings: Vec<(&'static str, String)>,
    ) -> Result<Option<Self>> {
        let place = Scratch::new()?;
        let file = place.join("policy.yaml");
        fs::write(&file, policy)?;
        settings.push(("CODELIA_SANDBOX_POLICY", file.display().to_string()));
        let Some(mut cluster) = isolating_with(mode, 1, settings).await? else { return Ok(None) };
        // A second one, for requests that nobody decides about.
        cluster.add_api_with(&[("CODELIA_APPROVALS_TIMEOUT", "1s")]).await?;
        let caller = cluster.tenant("a").await?;
        let decider = caller.with_secret(&cluster.key("a", &[Scope::Approve]).await?)?;
        Ok(Some(Self { cluster, caller, decider }))
    }

    /// The same caller, whose approvals expire after a second.
    async fn impatient(&self) -> Result<Client> {
        Client::connect(&self.cluster.endpoint(1), &self.caller.secret).await
    }

    /// The events of a kind about a run.
    async fn events(&self, kind: EventKind, run: &Run) -> Result<Vec<RecordedEvent>> {
        let events = recorded_events(&self.cluster.store, &"a".parse()?, Some(kind)).await?;
        let is_about = |event: &RecordedEvent| {
            event.subject.run.is_some_and(|id| id.to_string() == run.run_id)
        };
        Ok(events.into_iter().filter(is_about).collect())
    }
}

async fn decide(
    client: &Client,
    run: &Run,
    decision: ApprovalDecision,
    scope: ApprovalScope,
) -> Result<Approval, Status> {
    let request = DecideApprovalRequest {
        name: run.waiting_for_approval.clone(),
        decision: decision.into(),
        scope: scope.into(),
        reason: "checked".into(),
        ..DecideApprovalRequest::default()
    };
    let decided = client.approvals().decide_approval(request).await?.into_inner();
    decided.approval.ok_or_else(|| Status::internal("no approval"))
}

async fn allow(client: &Client, run: &Run) -> Result<Approval, Status> {
    decide(client, run, ApprovalDecision::Allow, ApprovalScope::Once).await
}

async fn deny(client: &Client, run: &Run) -> Result<Approval, Status> {
    decide(client, run, ApprovalDecision::Deny, ApprovalScope::Unspecified).await
}

/// Why a run ended without being started.
async fn refused(client: &Client, run: &Run) -> Result<String> {
    match client.watch_to_end(&run.name, 0).await?.outcome() {
        Kind::Refused(refused) => Ok(refused.reason),
        other => anyhow::bail!("{other:?}"),
    }
}

/// The key that a client uses.
async fn key_of(client: &Client) -> Result<String> {
    let me = client.info().who_am_i(WhoAmIRequest {}).await?.into_inner();
    Ok(me.key.context("a key")?.key_id)
}

/// A server on the loopback of the host, where the worker is. Returns its port and counts
/// connections.
fn serve_on_loopback() -> Result<(u16, Arc<AtomicUsize>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let (port, count) = (listener.local_addr()?.port(), Arc::new(AtomicUsize::new(0)));
    let counter = count.clone();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            counter.fetch_add(1, Ordering::Relaxed);
            let _ = stream.write_all(b"from the host\n");
        }
    });
    Ok((port, count))
}

async fn host_network_needs_approval_each_time(mode: &'static str) -> Result<()> {
    let Some(setup) = Setup::under(mode, "network: {mode: host}").await? else { return Ok(()) };
    let Setup { caller, decider, .. } = &setup;
    let (port, connections) = serve_on_loopback()?;
    let session = caller.session().await?.name;
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3");
    let start = |client: &Client, network: NetworkMode| {
        let request = command(&session, &["bash", "-c", &script]);
        let (client, request) =
            (client.clone(), StartRunRequest { network: network.into(), ..request });
        async move { client.start(request).await }
    };
    // The control: neither of the other modes gets there.
    for network in [NetworkMode::None, NetworkMode::Proxy] {
        let run = start(caller, network).await?;
        assert_eq!(run.waiting_for_approval, "", "{network:?}");
        let done = caller.watch_to_end(&run.name, 0).await?;
        assert_eq!((done.stdout_text().as_str(), done.outcome()), ("", Exited(1)), "{network:?}");
    }
    let run = start(caller, NetworkMode::Host).await?;
    assert_ne!(run.waiting_for_approval, "");
    let status = allow(caller, &run).await.expect_err("its own request");
    assert_eq!(refusal(&status).reason, "APPROVAL_OWN_REQUEST");
    for scope in [ApprovalScope::Session, ApprovalScope::Tenant] {
        let status =
            decide(decider, &run, ApprovalDecision::Allow, scope).await.expect_err("once only");
        assert_eq!(refusal(&status).fields, ["scope"]);
    }
    assert_eq!(connections.load(Ordering::Relaxed), 0, "nothing was reached without an approval");
    let approval = allow(decider, &run).await?;
    let done = caller.watch_to_end(&run.name, 0).await?;
    assert_eq!((done.stdout_text().as_str(), done.outcome()), ("from the host\n", Exited(0)));
    assert_eq!(connections.load(Ordering::Relaxed), 1);

    // Who decided and why is in the record of the run and in the audit.
    let record = caller.get_run(&run.name).await?;
    assert_eq!(record.network(), NetworkMode::Host);
    let recorded = record.approval.context("the approval of the run")?;
    assert_eq!((recorded.kind(), recorded.reason.as_str()), (ApprovalKind::NetworkHost, "checked"));
    assert_eq!(recorded.decided_by, key_of(decider).await?);
    assert_eq!(recorded.decided_by, approval.decided_by);
    let events = setup.events(EventKind::ApprovalAllowed, &run).await?;
    let [event] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(event.subject.key.map(|key| key.to_string()), Some(recorded.decided_by));
    assert_eq!(
        (&event.body.detail["kind"], &event.body.detail["reason"]),
        (&"network_host".into(), &"checked".into())
    );

    let again = start(caller, NetworkMode::Host).await?;
    assert_ne!(again.waiting_for_approval, "", "each run needs its own");
    deny(decider, &again).await?;
    assert_eq!(refused(caller, &again).await?, "APPROVAL_DENIED");
    let impatient = setup.impatient().await?;
    let nobody = start(&impatient, NetworkMode::Host).await?;
    assert_eq!(refused(caller, &nobody).await?, "APPROVAL_EXPIRED");
    assert_eq!(connections.load(Ordering::Relaxed), 1, "no other run was started");
    setup.cluster.end().await
}

#[tokio::test]
async fn host_network_needs_approval_each_time_in_mode_bwrap() -> Result<()> {
    host_network_needs_approval_each_time("bwrap").await
}

#[tokio::test]
async fn host_network_needs_approval_each_time_in_mode_nsjail() -> Result<()> {
    host_network_needs_approval_each_time("nsjail").await
}

#[tokio::test]
async fn host_network_needs_approval_each_time_in_mode_container() -> Result<()> {
    host_network_needs_approval_each_time("container").await
}

/// Sets the widest network of the tenant.
async fn set_network(operator: &Client, mode: NetworkMode) -> Result<()> {
    let network = NetworkPolicy { mode: mode.into(), ..NetworkPolicy::default() };
    let request = SetScopePolicyRequest {
        scope: PolicyScope::Organisation.into(),
        name: "a".into(),
        policy: Some(Policy { network: Some(network), ..Policy::default() }),
        reason: "a test".into(),
        expected_version: None,
    };
    operator.policies().set_scope_policy(request).await?;
    Ok(())
}

/// What an operator can withdraw while a run waits.
#[derive(Debug, Clone, Copy)]
enum Permission {
    HostNetwork,
    NoIsolation,
}

impl Permission {
    async fn set(self, operator: &Client, permits: bool) -> Result<()> {
        match (self, permits) {
            (Self::HostNetwork, true) => set_network(operator, NetworkMode::Unspecified).await,
            (Self::HostNetwork, false) => set_network(operator, NetworkMode::Proxy).await,
            (Self::NoIsolation, true) => {
                set_floor(operator, IsolationLevel::IsolationLevel0).await.map(drop)
            }
            (Self::NoIsolation, false) => {
                set_floor(operator, IsolationLevel::Unspecified).await.map(drop)
            }
        }
    }

    /// A request that needs it, for a command that writes a file.
    fn request(self, session: &str, file: &str) -> StartRunRequest {
        let request = command(session, &["touch", file]);
        match self {
            Self::HostNetwork => StartRunRequest { network: NetworkMode::Host.into(), ..request },
            Self::NoIsolation => StartRunRequest { mode: SandboxMode::Logical.into(), ..request },
        }
    }

    /// The field that a refusal names.
    fn field(self) -> &'static str {
        match self {
            Self::HostNetwork => "network host",
            Self::NoIsolation => "mode logical",
        }
    }
}

/// With one slot, which another run holds, a run that was allowed waits until that one ends.
#[tokio::test]
async fn withdrawn_permission_stops_waiting_run() -> Result<()> {
    let settings = vec![("CODELIA_WORKER_SLOTS", "1".to_owned())];
    let Some(setup) = Setup::start("bwrap", "network: {mode: host}", settings).await? else {
        return Ok(());
    };
    let Setup { caller, decider, .. } = &setup;
    let operator = setup.cluster.operator().await?;
    let (busy, session) = (caller.session().await?.name, caller.session().await?.name);
    for permission in [Permission::HostNetwork, Permission::NoIsolation] {
        for withdrawn in [true, false] {
            let case = format!("{permission:?}, withdrawn: {withdrawn}");
            permission.set(&operator, true).await?;
            let mut other = Exec::start(caller, shell(&busy, "echo up; sleep 1000")).await?;
            other.until_stdout("up").await?;
            let file = format!("{permission:?}-{withdrawn}");
            let run = caller.start(permission.request(&session, &file)).await?;
            assert_ne!(run.waiting_for_approval, "", "{case}");
            if withdrawn {
                permission.set(&operator, false).await?;
                let status = allow(decider, &run).await.expect_err("withdrawn before the decision");
                assert_eq!(refusal(&status).reason, "APPROVAL_NOT_PERMITTED", "{status:?}");
                permission.set(&operator, true).await?;
            }
            allow(decider, &run).await?;
            // Between the decision and the start.
            permission.set(&operator, !withdrawn).await?;
            drop(other);
            let outcome = caller.watch_to_end(&run.name, 0).await?.outcome();
            if withdrawn {
                let Kind::Refused(refused) = &outcome else { panic!("{case}: {outcome:?}") };
                assert_eq!(refused.reason, "APPROVAL_NOT_PERMITTED", "{case}: {outcome:?}");
                assert!(refused.message.contains(permission.field()), "{case}: {outcome:?}");
            } else {
                assert_eq!(outcome, Exited(0), "the control: {case}");
            }
            assert_eq!(caller.get(&session, &file).await.is_ok(), !withdrawn, "{case}");
        }
    }
    setup.cluster.end().await
}

/// Sets the floor of the tenant, and the level that runs may ask for.
async fn set_floor(operator: &Client, ask: IsolationLevel) -> Result<Tenant> {
    let request = SetIsolationFloorRequest {
        name: "tenants/a".into(),
        level: IsolationLevel::IsolationLevel2.into(),
        reason: "a test".into(),
        ask_level: ask.into(),
    };
    let tenant = operator.admin().set_isolation_floor(request).await?.into_inner().tenant;
    tenant.context("a tenant")
}

#[tokio::test]
async fn less_isolation_needs_permission_and_approval() -> Result<()> {
    let Some(setup) = Setup::under("bwrap", "").await? else { return Ok(()) };
    let Setup { caller, decider, .. } = &setup;
    let operator = setup.cluster.operator().await?;
    let session = caller.session().await?.name;
    // A directory of the host that no isolated command sees.
    let script = format!("test -d {}", setup.cluster.directory().display());
    let start = |client: &Client, mode: SandboxMode| {
        let request =
            StartRunRequest { mode: mode.into(), ..command(&session, &["sh", "-c", &script]) };
        let client = client.clone();
        async move { client.start(request).await }
    };
    for not_so_low in [IsolationLevel::Unspecified, IsolationLevel::IsolationLevel1] {
        set_floor(&operator, not_so_low).await?;
        let status =
            start(caller, SandboxMode::Logical).await.expect_err("below what may be asked for");
        assert_eq!(refusal(&status).reason, "ISOLATION_FLOOR", "{status:?}");
    }
    let tenant = set_floor(&operator, IsolationLevel::IsolationLevel0).await?;
    let floor = tenant.isolation_floor.context("a floor")?;
    assert_eq!(floor.ask_level(), IsolationLevel::IsolationLevel0);

    // The control: the session's own mode needs no approval and does not see the directory.
    let isolated = start(caller, SandboxMode::Unspecified).await?;
    assert_eq!(isolated.waiting_for_approval, "");
    assert_eq!(caller.watch_to_end(&isolated.name, 0).await?.outcome(), Exited(1));
    let run = start(caller, SandboxMode::Logical).await?;
    assert_ne!(run.waiting_for_approval, "");
    let status = allow(caller, &run).await.expect_err("its own request");
    assert_eq!(refusal(&status).reason, "APPROVAL_OWN_REQUEST");
    let approval = allow(decider, &run).await?;
    assert_eq!(approval.kind(), ApprovalKind::Isolation);
    assert!(approval.message.contains("LEVEL_0 instead of LEVEL_2"), "{approval:?}");
    assert_eq!(caller.watch_to_end(&run.name, 0).await?.outcome(), Exited(0));
    let recorded = caller.get_run(&run.name).await?.approval.context("the approval of the run")?;
    assert_eq!((recorded.decided_by, recorded.reason), (key_of(decider).await?, "checked".into()));
    let events = setup.events(EventKind::ApprovalAllowed, &run).await?;
    assert_eq!(
        events.iter().map(|event| &event.body.detail["kind"]).collect::<Vec<_>>(),
        ["isolation"]
    );

    let denied = start(caller, SandboxMode::Logical).await?;
    deny(decider, &denied).await?;
    assert_eq!(refused(caller, &denied).await?, "APPROVAL_DENIED");
    let nobody = start(&setup.impatient().await?, SandboxMode::Logical).await?;
    assert_eq!(refused(caller, &nobody).await?, "APPROVAL_EXPIRED");

    // A decision for the session holds until the operator permits it no more.
    let run = start(caller, SandboxMode::Logical).await?;
    decide(decider, &run, ApprovalDecision::Allow, ApprovalScope::Session).await?;
    assert_eq!(start(caller, SandboxMode::Logical).await?.waiting_for_approval, "");
    set_floor(&operator, IsolationLevel::Unspecified).await?;
    let status = start(caller, SandboxMode::Logical).await.expect_err("not permitted any more");
    assert_eq!(refusal(&status).reason, "ISOLATION_FLOOR", "{status:?}");
    let tenant = "a".parse()?;
    let set =
        recorded_events(&setup.cluster.store, &tenant, Some(EventKind::IsolationFloorSet)).await?;
    let asked: Vec<Value> = set.into_iter().map(|event| event.body.detail["ask"].clone()).collect();
    assert!(asked.contains(&"LEVEL_0".into()), "{asked:?}");
    setup.cluster.end().await
}
