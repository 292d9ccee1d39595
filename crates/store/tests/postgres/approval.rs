//! Approvals: one decision each, expiry, grants, and the runs that wait for them.

use std::time::Duration;

use codelia_policy::{IsolationLevel, NetworkPolicy, Policy};
use codelia_store::{
    Approval, ApprovalFilter, ApprovalKind, ApprovalReach, ApprovalRequest, ApprovalScope,
    ApprovalState, ApprovalStatus, Cancellation, Decision, DecisionResult, Error, EventKind, Grant,
    HeldSessions, MAX_OF_RUN, MAX_PENDING_OF_RUN, MAX_PENDING_OF_TENANT, NewApproval, NewRun,
    NotDecided, Options, Permitted, ReadGrant, Retention, Revocation, RunAdmission, RunFilter,
    RunState, SessionRef, Store, WantedSessions, Withdrawn,
};
use codelia_tests::{eventually, recorded_events};
use codelia_types::{ApprovalId, KeyId, NetworkMode, Outcome, Reason, RunId, SessionId, TenantId};
use futures::future::join_all;
use sqlx::Connection;

use crate::harness::{Fixture, LONG};

const MOMENT: Duration = Duration::from_micros(1);
const DAYS_200_IN_MILLIS: u128 = 200 * 24 * 3600 * 1000;

pub(crate) fn needed(requested_by: KeyId, timeout: Duration) -> NewApproval {
    NewApproval {
        id: ApprovalId::generate(),
        kind: ApprovalKind::NetworkProxy,
        host: String::new(),
        port: 0,
        message: "\"curl\" requests the network".into(),
        requested_by,
        timeout,
    }
}

fn allow(scope: ApprovalScope) -> Decision {
    let permitted = Permitted { network: NetworkMode::Host, isolation: IsolationLevel::None };
    let reason = Some("looks fine".into());
    Decision { allow: Some(scope), reach: None, key: KeyId::generate(), reason, permitted }
}

pub(crate) fn deny() -> Decision {
    Decision { allow: None, ..allow(ApprovalScope::Once) }
}

fn proxy() -> Grant {
    Grant { kind: ApprovalKind::NetworkProxy, host: String::new(), port: 0 }
}

impl Fixture {
    /// Inserts a run that waits for an approval.
    pub(crate) async fn hold(&self, session: SessionId, new: &NewApproval) -> RunId {
        let run = NewRun { approval: Some(new), queue_timeout: MOMENT, ..self.new_run(session) };
        match self.store.run_insert(run, self.quotas).await.unwrap() {
            RunAdmission::Recorded { run, incarnation: None, .. } => {
                assert_eq!((run.state, run.approval), (RunState::Queued, Some(new.id)));
                run.id
            }
            other => panic!("{other:?}"),
        }
    }

    async fn decide(&self, id: ApprovalId, decision: &Decision) -> DecisionResult {
        self.store.approval_decide(&self.tenant, id, decision).await.unwrap()
    }

    pub(crate) async fn decided(&self, id: ApprovalId, decision: &Decision) -> Approval {
        match self.decide(id, decision).await {
            DecisionResult::Decided { approval, .. } => *approval,
            other => panic!("{other:?}"),
        }
    }

    async fn approval(&self, id: ApprovalId) -> Approval {
        self.store.approval_get(&self.tenant, id).await.unwrap().unwrap()
    }

    /// A run that is running and may request approvals.
    async fn asking_run(&self, session: SessionId) -> RunId {
        let run = NewRun { requested_by: Some(KeyId::generate()), ..self.new_run(session) };
        match self.store.run_insert(run, self.quotas).await.unwrap() {
            RunAdmission::Recorded { run, incarnation: Some(_), .. } => run.id,
            other => panic!("{other:?}"),
        }
    }

    fn request(&self, session: SessionId, run: RunId, host: &str) -> ApprovalRequest {
        ApprovalRequest {
            tenant: self.tenant.clone(),
            session,
            run,
            kind: ApprovalKind::EgressHost,
            host: host.into(),
            port: 443,
            path: String::new(),
            reader: Default::default(),
            message: format!("connect to {host}:443"),
            timeout: LONG,
        }
    }

    async fn refusal(&self, run: RunId) -> (Reason, String) {
        match self.run(run).await.outcome().cloned() {
            Some(Outcome::Refused(refusal)) => (refusal.reason, refusal.message),
            other => panic!("{other:?}"),
        }
    }
}

/// Sets the policy of a tenant.
async fn set_policy(store: &Store, tenant: &TenantId, policy: &Policy, key: KeyId) {
    let policy = Some(policy);
    let new = codelia_store::NewPolicyVersion {
        policy,
        expected: None,
        restored: None,
        reason: "a test",
        key,
    };
    let set =
        store.scope_policy_set(&codelia_store::ScopeRef::organisation(tenant), new).await.unwrap();
    assert!(matches!(set, codelia_store::ScopePolicySet::Set(_)), "{set:?}");
}

#[tokio::test]
async fn two_deciders_at_once_only_one_wins() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    for _ in 0..5 {
        let new = needed(KeyId::generate(), LONG);
        fixture.hold(session.id, &new).await;
        let decisions: Vec<_> =
            (0..8).map(|n| if n % 2 == 0 { allow(ApprovalScope::Once) } else { deny() }).collect();
        let results =
            join_all(decisions.iter().map(|decision| fixture.decide(new.id, decision))).await;
        let (mut winners, mut losers) = (Vec::new(), Vec::new());
        for result in results {
            match result {
                DecisionResult::Decided { approval, .. } => winners.push(approval),
                DecisionResult::NotDecided(NotDecided::Before(approval)) => losers.push(approval),
                other => panic!("{other:?}"),
            }
        }
        let [winner] = winners.as_slice() else { panic!("{winners:?}") };
        assert_eq!(losers.len(), 7);
        assert!(losers.iter().all(|loser| loser.decided_by == winner.decided_by), "{losers:?}");
        assert_eq!(fixture.approval(new.id).await.decided_by, winner.decided_by);
    }
    fixture.end().await;
}

#[tokio::test]
async fn withdrawn_permission_cannot_be_allowed() {
    let fixture = Fixture::new().await;
    let (store, tenant, key) = (&fixture.store, &fixture.tenant, KeyId::generate());
    let session = fixture.session().await;
    let set_network = async |mode| {
        let network = NetworkPolicy { mode, ..NetworkPolicy::default() };
        let policy = Policy { network, ..Policy::default() };
        set_policy(store, tenant, &policy, key).await;
    };
    let set_floor = async |ask| {
        let level = IsolationLevel::Full;
        store.tenant_set_floor(tenant, level, ask, "a test", None).await.unwrap().unwrap();
    };
    let allow = allow(ApprovalScope::Once);
    let kinds = [ApprovalKind::NetworkProxy, ApprovalKind::NetworkHost, ApprovalKind::Isolation];
    for kind in kinds {
        let new = NewApproval { kind, ..needed(KeyId::generate(), LONG) };
        let run = fixture.hold(session.id, &new).await;
        let expected = match kind {
            ApprovalKind::NetworkProxy => Withdrawn::Network(NetworkMode::None),
            ApprovalKind::NetworkHost => Withdrawn::Network(NetworkMode::Proxy),
            _ => Withdrawn::Isolation(IsolationLevel::Full),
        };
        let narrow =
            if kind == ApprovalKind::NetworkProxy { NetworkMode::None } else { NetworkMode::Proxy };
        set_network(Some(narrow)).await;
        set_floor(None).await;
        match fixture.decide(new.id, &allow).await {
            DecisionResult::NotDecided(NotDecided::NotPermitted(now)) => assert_eq!(now, expected),
            other => panic!("{kind}: {other:?}"),
        }
        assert_eq!(fixture.approval(new.id).await.state, ApprovalState::Pending, "{kind}");
        assert_eq!(fixture.run(run).await.approval, Some(new.id), "the run still waits");
        // The control: with the permission the same decision counts.
        set_network(None).await;
        set_floor(Some(IsolationLevel::None)).await;
        assert_eq!(fixture.decided(new.id, &allow).await.state, ApprovalState::Allowed, "{kind}");
    }
    fixture.end().await;
}

#[tokio::test]
async fn withdrawn_permission_shows_when_run_begins() {
    let fixture = Fixture::new().await;
    let (store, tenant, key) = (&fixture.store, &fixture.tenant, KeyId::generate());
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let new = needed(KeyId::generate(), LONG);
    let run = fixture.hold(session.id, &new).await;
    store
        .tenant_set_floor(tenant, IsolationLevel::None, None, "a test", None)
        .await
        .unwrap()
        .unwrap();
    fixture.decided(new.id, &allow(ApprovalScope::Once)).await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let mut run = store.run_begin(run, &lease.token).await.unwrap().unwrap();
    run.spec.network = Some(NetworkMode::Proxy);
    assert_eq!(store.run_withdrawn(&run).await.unwrap(), None, "the control");
    let network = NetworkPolicy { mode: Some(NetworkMode::None), ..NetworkPolicy::default() };
    let policy = Policy { network, ..Policy::default() };
    set_policy(store, tenant, &policy, key).await;
    let withdrawn = store.run_withdrawn(&run).await.unwrap();
    assert_eq!(withdrawn, Some(Withdrawn::Network(NetworkMode::None)));
    run.spec.network = Some(NetworkMode::None);
    assert_eq!(store.run_withdrawn(&run).await.unwrap(), None);
    store
        .tenant_set_floor(tenant, IsolationLevel::Full, None, "a test", None)
        .await
        .unwrap()
        .unwrap();
    let withdrawn = store.run_withdrawn(&run).await.unwrap();
    assert_eq!(withdrawn, Some(Withdrawn::Isolation(IsolationLevel::Full)));
    fixture.end().await;
}

#[tokio::test]
async fn held_run_starts_only_after_approval() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let new = needed(KeyId::generate(), LONG);
    let run = fixture.hold(session.id, &new).await;
    let wanted = || fixture.store.lease_list_wanted(&worker.id, worker.incarnation, 10);
    assert_eq!(wanted().await.unwrap(), WantedSessions::default(), "no worker is wanted for it");
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let queued =
        || fixture.store.run_list_queued(&worker.id, worker.incarnation, HeldSessions::All, 10);
    assert!(queued().await.unwrap().is_empty());
    assert!(fixture.store.run_begin(run, &lease.token).await.unwrap().is_none());
    assert_eq!(
        fixture.store.run_expire_queued_any_tenant(10).await.unwrap(),
        0,
        "its time has not begun"
    );
    assert_eq!(fixture.store.run_queue_any_tenant().await.unwrap().depth, 0);

    let result = fixture.decide(new.id, &allow(ApprovalScope::Once)).await;
    let DecisionResult::Decided { run: Some(woken), .. } = result else { panic!("{result:?}") };
    assert_eq!(woken.session, session.id);
    assert!(woken.holder.is_some(), "the worker that holds the session is named");
    assert_eq!(fixture.run(run).await.approval, None);
    assert_eq!(wanted().await.unwrap().held, [session.id], "if the notice to the worker is lost");
    assert_eq!(queued().await.unwrap().len(), 1);
    assert!(fixture.store.run_begin(run, &lease.token).await.unwrap().is_some());
    fixture.end().await;
}

#[tokio::test]
async fn allowed_run_finds_worker_for_its_session() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let new = needed(KeyId::generate(), LONG);
    fixture.hold(session.id, &new).await;
    fixture.decided(new.id, &allow(ApprovalScope::Once)).await;
    let wanted = fixture.store.lease_list_wanted(&worker.id, worker.incarnation, 10).await.unwrap();
    assert_eq!(wanted.free, [session.id]);
    fixture.end().await;
}

#[tokio::test]
async fn held_run_is_listed_and_counted_as_queued() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let new = needed(KeyId::generate(), LONG);
    let run = fixture.hold(session.id, &new).await;
    for session in [None, Some(session.id)] {
        for state in [None, Some(RunState::Queued)] {
            let filter = RunFilter { session, state, ..RunFilter::default() };
            let listed = fixture.store.run_list(&fixture.tenant, &filter, 10).await.unwrap();
            assert_eq!(listed.len(), 1, "{filter:?}");
            assert_eq!((listed[0].id, listed[0].approval), (run, Some(new.id)));
        }
        for state in [RunState::Running, RunState::Ended] {
            let filter = RunFilter { session, state: Some(state), ..RunFilter::default() };
            assert!(fixture.store.run_list(&fixture.tenant, &filter, 10).await.unwrap().is_empty());
        }
    }
    assert_eq!(fixture.store.tenant_usage(&fixture.tenant).await.unwrap().queued_runs, 1);
    fixture.end().await;
}

#[tokio::test]
async fn retry_of_request_finds_its_held_run() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let first = needed(KeyId::generate(), LONG);
    let second = NewApproval { id: ApprovalId::generate(), ..first.clone() };
    let insert = |approval| {
        let idempotency = Some(("key", b"hash".as_slice()));
        let new = NewRun { approval: Some(approval), idempotency, ..fixture.new_run(session.id) };
        fixture.store.run_insert(new, fixture.quotas)
    };
    let RunAdmission::Recorded { run, .. } = insert(&first).await.unwrap() else {
        panic!("not recorded")
    };
    let RunAdmission::Existing(existing) = insert(&second).await.unwrap() else {
        panic!("inserted twice")
    };
    assert_eq!((existing.id, existing.approval), (run.id, Some(first.id)));
    assert!(fixture.store.approval_get(&fixture.tenant, second.id).await.unwrap().is_none());
    fixture.end().await;
}

#[tokio::test]
async fn denied_run_is_refused_with_reason() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let new = needed(KeyId::generate(), LONG);
    let run = fixture.hold(session.id, &new).await;
    let decision = Decision { reason: Some("not today".into()), ..deny() };
    assert_eq!(fixture.decided(new.id, &decision).await.state, ApprovalState::Denied);
    let (reason, message) = fixture.refusal(run).await;
    assert_eq!(reason, Reason::ApprovalDenied);
    assert_eq!(message, format!("approval {} was denied: not today", new.id));
    fixture.end().await;
}

#[tokio::test]
async fn expiry_denies_by_database_clock() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let new = needed(KeyId::generate(), MOMENT);
    let run = fixture.hold(session.id, &new).await;
    // No sweep has run, and it is expired all the same.
    assert_eq!(fixture.approval(new.id).await.state, ApprovalState::Expired);
    let result = fixture.decide(new.id, &allow(ApprovalScope::Tenant)).await;
    let DecisionResult::NotDecided(NotDecided::Before(before)) = result else {
        panic!("{result:?}")
    };
    assert_eq!((before.state, before.decided_by), (ApprovalState::Expired, None));
    let decided = fixture.store.approvals_decided(&[new.id]).await.unwrap();
    assert_eq!(decided[0].state, ApprovalState::Expired);
    let pending = ApprovalFilter::default();
    assert!(fixture.store.approval_list(&fixture.tenant, &pending, 10).await.unwrap().is_empty());

    assert_eq!(fixture.store.approval_expire_any_tenant(10).await.unwrap(), 1);
    assert_eq!(fixture.store.approval_expire_any_tenant(10).await.unwrap(), 0);
    let (reason, message) = fixture.refusal(run).await;
    assert_eq!(reason, Reason::ApprovalExpired);
    assert!(message.contains(&new.id.to_string()), "{message}");
    let kind = Some(EventKind::ApprovalExpired);
    let events = recorded_events(&fixture.store, &fixture.tenant, kind).await.unwrap();
    assert_eq!((events.len(), events[0].subject.run), (1, Some(run)));
    fixture.end().await;
}

#[tokio::test]
async fn requester_and_other_tenants_cannot_decide() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let requester = KeyId::generate();
    let new = needed(requester, LONG);
    fixture.hold(session.id, &new).await;
    for decision in [allow(ApprovalScope::Once), deny()] {
        let own = Decision { key: requester, ..decision.clone() };
        let result = fixture.decide(new.id, &own).await;
        assert!(matches!(result, DecisionResult::NotDecided(NotDecided::OwnRequest)), "{result:?}");
        let result =
            fixture.store.approval_decide(&fixture.other, new.id, &decision).await.unwrap();
        assert!(matches!(result, DecisionResult::NotDecided(NotDecided::NotFound)), "{result:?}");
    }
    assert!(fixture.store.approval_get(&fixture.other, new.id).await.unwrap().is_none());
    assert_eq!(fixture.approval(new.id).await.state, ApprovalState::Pending);
    let mut connection = fixture.database.connection().await.unwrap();
    let own = "UPDATE approvals SET state = 'allowed', scope = 'once', decided_by = requested_by, decided_at = now()";
    let refused = sqlx::query(own).execute(&mut connection).await.unwrap_err();
    assert!(refused.to_string().contains("check constraint"), "{refused}");
    connection.close().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn run_that_ends_withdraws_its_approval() {
    let fixture = Fixture::new().await;
    let (kept, closed) = (fixture.session().await, fixture.session().await);
    let [canceled, in_closed] = [(); 2].map(|()| needed(KeyId::generate(), LONG));
    let run = fixture.hold(kept.id, &canceled).await;
    let other = fixture.hold(closed.id, &in_closed).await;
    let cancellation = Cancellation::default();
    let ended =
        fixture.store.run_cancel(&fixture.tenant, run, &cancellation).await.unwrap().unwrap();
    assert_eq!(ended.outcome(), Some(&Outcome::Canceled));
    fixture
        .store
        .session_close(&fixture.tenant, &SessionRef::Id(closed.id))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(fixture.run(other).await.outcome(), Some(&Outcome::Canceled));
    for id in [canceled.id, in_closed.id] {
        let approval = fixture.approval(id).await;
        assert_eq!(approval.state, ApprovalState::Expired);
        assert_eq!(approval.reason.as_deref(), Some("the run ended"));
        let result = fixture.decide(id, &allow(ApprovalScope::Tenant)).await;
        assert!(matches!(result, DecisionResult::NotDecided(NotDecided::Before(_))), "{result:?}");
    }
    fixture.end().await;
}

#[tokio::test]
async fn expired_session_ends_its_held_runs() {
    let fixture = Fixture::new().await;
    let session = fixture.session_with(Duration::from_millis(1), None).await;
    // The session still accepts it.
    let new = needed(KeyId::generate(), LONG);
    let run = NewRun { approval: Some(&new), ..fixture.new_run(session.id) };
    let RunAdmission::Recorded { run, .. } =
        fixture.store.run_insert(run, fixture.quotas).await.unwrap()
    else {
        return fixture.end().await;
    };
    eventually("the run has ended", || async {
        fixture.store.session_expire_any_tenant(10).await.unwrap();
        fixture.store.run_end_queues_any_tenant(10).await.unwrap();
        (fixture.run(run.id).await.state == RunState::Ended).then_some(())
    })
    .await;
    assert_eq!(fixture.refusal(run.id).await.0, Reason::SessionEnded);
    assert_eq!(fixture.approval(new.id).await.state, ApprovalState::Expired);
    fixture.end().await;
}

#[tokio::test]
async fn suspended_tenant_loses_held_runs() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let new = needed(KeyId::generate(), LONG);
    let run = fixture.hold(session.id, &new).await;
    fixture.store.tenant_suspend(&fixture.tenant, "unpaid", KeyId::generate()).await.unwrap();
    fixture.store.tenant_sweep_any_tenant(10).await.unwrap();
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Canceled));
    assert_eq!(fixture.approval(new.id).await.state, ApprovalState::Expired);
    fixture.end().await;
}

#[tokio::test]
async fn grant_holds_for_its_scope_until_revoked() {
    let fixture = Fixture::new().await;
    let (one, two) = (fixture.session().await, fixture.session().await);
    let granted = async |session: SessionId| {
        fixture
            .store
            .approval_granted(&fixture.tenant, session, &proxy())
            .await
            .unwrap()
            .map(|a| a.id)
    };
    let once = needed(KeyId::generate(), LONG);
    fixture.hold(one.id, &once).await;
    fixture.decided(once.id, &allow(ApprovalScope::Once)).await;
    assert_eq!(granted(one.id).await, None, "once is for one run");

    let for_session = needed(KeyId::generate(), LONG);
    fixture.hold(one.id, &for_session).await;
    fixture.decided(for_session.id, &allow(ApprovalScope::Session)).await;
    assert_eq!(granted(one.id).await, Some(for_session.id));
    assert_eq!(granted(two.id).await, None);
    let host = Grant { kind: ApprovalKind::NetworkHost, ..proxy() };
    assert!(
        fixture.store.approval_granted(&fixture.tenant, one.id, &host).await.unwrap().is_none()
    );

    let for_tenant = needed(KeyId::generate(), LONG);
    fixture.hold(two.id, &for_tenant).await;
    fixture.decided(for_tenant.id, &allow(ApprovalScope::Tenant)).await;
    assert_eq!(granted(two.id).await, Some(for_tenant.id));
    assert_eq!(fixture.store.approval_grants(&fixture.tenant, two.id).await.unwrap(), [proxy()]);
    assert!(fixture.store.approval_grants(&fixture.other, two.id).await.unwrap().is_empty());
    let filter = ApprovalFilter { status: ApprovalStatus::Granted, ..ApprovalFilter::default() };
    assert_eq!(fixture.store.approval_list(&fixture.tenant, &filter, 10).await.unwrap().len(), 2);

    let revocation = Revocation { key: KeyId::generate(), reason: Some("too wide".into()) };
    let revoke =
        async |id| fixture.store.approval_revoke(&fixture.tenant, id, &revocation).await.unwrap();
    let result = revoke(for_tenant.id).await;
    assert!(matches!(result, DecisionResult::Decided { .. }), "{result:?}");
    assert_eq!(granted(two.id).await, None);
    assert_eq!(fixture.approval(for_tenant.id).await.revoke_reason.as_deref(), Some("too wide"));
    for id in [for_tenant.id, once.id] {
        let result = revoke(id).await;
        assert!(
            matches!(result, DecisionResult::NotDecided(NotDecided::NotGranted(_))),
            "{result:?}"
        );
    }
    let result =
        fixture.store.approval_revoke(&fixture.other, for_session.id, &revocation).await.unwrap();
    assert!(matches!(result, DecisionResult::NotDecided(NotDecided::NotFound)), "{result:?}");
    fixture.end().await;
}

#[tokio::test]
async fn running_run_requests_once_and_gets_decision() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.asking_run(session.id).await;
    let request = fixture.request(session.id, run, "example.com");
    let ask =
        async |request: &ApprovalRequest| fixture.store.approval_request(request).await.unwrap();
    let (first, second) = tokio::join!(ask(&request), ask(&request));
    assert_eq!(first, second, "the same request");
    assert_eq!((first.state, first.run), (ApprovalState::Pending, Some(run)));
    assert!(fixture.store.approvals_decided(&[first.id]).await.unwrap().is_empty());
    let denied = fixture.decided(first.id, &deny()).await;
    assert_eq!(
        fixture.store.approvals_decided(&[first.id]).await.unwrap(),
        std::slice::from_ref(&denied)
    );
    assert_eq!(ask(&request).await, denied, "a denial holds for the run");

    let other = fixture.request(session.id, run, "other.example");
    let pending = ask(&other).await;
    fixture.decided(pending.id, &allow(ApprovalScope::Session)).await;
    let later = fixture.request(session.id, fixture.asking_run(session.id).await, "other.example");
    let answer = ask(&later).await;
    assert_eq!(
        (answer.id, answer.state),
        (pending.id, ApprovalState::Allowed),
        "granted to the session"
    );
    let grant = Grant { kind: ApprovalKind::EgressHost, host: "other.example".into(), port: 443 };
    assert_eq!(fixture.store.approval_grants(&fixture.tenant, session.id).await.unwrap(), [grant]);
    let port = ApprovalRequest { port: 22, ..later };
    assert_eq!(ask(&port).await.state, ApprovalState::Pending, "another port is another subject");
    fixture.store.approval_withdraw(port.run).await.unwrap();
    assert_eq!(fixture.store.approvals_decided(&[ask(&other).await.id]).await.unwrap().len(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn decision_about_file_has_a_reach() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.asking_run(session.id).await;
    let ask = |path: &str| {
        let request = ApprovalRequest {
            kind: ApprovalKind::FileRead,
            port: 0,
            path: path.into(),
            ..fixture.request(session.id, run, "")
        };
        let store = &fixture.store;
        async move { store.approval_request(&request).await.unwrap() }
    };
    let (one, other) = (ask("/opt/one").await, ask("/opt/a/other").await);
    assert_ne!(one.id, other.id, "another file is another subject");
    assert_eq!(
        (ask("/opt/one").await.id, one.path.as_str(), one.reach),
        (one.id, "/opt/one", None)
    );
    let one = fixture.decided(one.id, &allow(ApprovalScope::Session)).await;
    assert_eq!(one.reach, Some(ApprovalReach::File), "the least is the default");
    let below = Decision { reach: Some(ApprovalReach::Directory), ..allow(ApprovalScope::Tenant) };
    let other = fixture.decided(other.id, &below).await;
    assert_eq!(other.reach, Some(ApprovalReach::Directory));
    let grants = |session| fixture.store.approval_read_grants(&fixture.tenant, session);
    let file = ReadGrant { path: "/opt/one".into(), reach: ApprovalReach::File };
    let directory = ReadGrant { path: "/opt/a/other".into(), reach: ApprovalReach::Directory };
    let mut own = grants(session.id).await.unwrap();
    own.sort_by(|one, other| one.path.cmp(&other.path));
    assert_eq!(own, [directory.clone(), file]);
    assert_eq!(grants(SessionId::generate()).await.unwrap(), [directory], "granted to the tenant");
    let host = fixture
        .store
        .approval_request(&fixture.request(session.id, run, "a.example"))
        .await
        .unwrap();
    let result = fixture.store.approval_decide(&fixture.tenant, host.id, &below).await.unwrap();
    assert!(matches!(result, DecisionResult::NotDecided(NotDecided::NoPath)), "{result:?}");
    fixture.end().await;
}

#[tokio::test]
async fn worker_role_requests_and_withdraws() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.asking_run(session.id).await;
    let url = fixture.database.url();
    let separator = if url.contains('?') { '&' } else { '?' };
    let options =
        Options::from_url(&format!("{url}{separator}options[role]=codelia_worker")).unwrap();
    let store = Store::connect(options).await.unwrap();
    let request =
        ApprovalRequest { timeout: MOMENT, ..fixture.request(session.id, run, "example.com") };
    store.approval_request(&request).await.unwrap();
    let again =
        store.approval_request(&ApprovalRequest { timeout: LONG, ..request }).await.unwrap();
    store.approval_withdraw(run).await.unwrap();
    assert_eq!(
        store.approvals_decided(&[again.id]).await.unwrap()[0].state,
        ApprovalState::Expired
    );
    assert!(store.approval_grants(&fixture.tenant, session.id).await.unwrap().is_empty());
    let held = needed(KeyId::generate(), LONG);
    fixture.hold(session.id, &held).await;
    let denied = store.approval_decide(&fixture.tenant, held.id, &allow(ApprovalScope::Once)).await;
    assert!(matches!(denied, Err(Error::Statement(_))), "{denied:?}");
    store.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn expired_request_may_be_made_again() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.asking_run(session.id).await;
    let request =
        ApprovalRequest { timeout: MOMENT, ..fixture.request(session.id, run, "example.com") };
    let first = fixture.store.approval_request(&request).await.unwrap();
    let again = ApprovalRequest { timeout: LONG, ..request };
    let second = fixture.store.approval_request(&again).await.unwrap();
    assert_ne!(first.id, second.id);
    assert_eq!(fixture.approval(first.id).await.state, ApprovalState::Expired);
    fixture.commit(run, &worker, &lease).await.unwrap();
    let ended = ApprovalRequest { host: "late.example".into(), ..again };
    assert!(matches!(fixture.store.approval_request(&ended).await, Err(Error::Fenced)));
    fixture.end().await;
}

#[tokio::test]
async fn pending_approvals_are_bounded() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.asking_run(session.id).await;
    let ask = async |host: String| {
        fixture.store.approval_request(&fixture.request(session.id, run, &host)).await
    };
    for number in 0..MAX_PENDING_OF_RUN {
        ask(format!("{number}.example")).await.unwrap();
    }
    let refused = ask("more.example".into()).await.unwrap_err();
    let expected = format!("the run has {MAX_PENDING_OF_RUN} pending approvals, the maximum");
    assert!(matches!(&refused, Error::TooManyApprovals { .. }), "{refused:?}");
    assert_eq!(refused.to_string(), expected);
    ask("0.example".into()).await.unwrap();

    fill(&fixture, session.id, run, MAX_OF_RUN, "denied").await;
    fixture.store.approval_withdraw(run).await.unwrap();
    let refused = ask("more.example".into()).await.unwrap_err();
    assert!(matches!(refused, Error::TooManyApprovals { limit: MAX_OF_RUN, .. }), "{refused:?}");

    fill(&fixture, session.id, RunId::generate(), MAX_PENDING_OF_TENANT, "pending").await;
    let new = needed(KeyId::generate(), LONG);
    let held = NewRun { approval: Some(&new), ..fixture.new_run(session.id) };
    let id = held.id;
    let refused = fixture.store.run_insert(held, fixture.quotas).await.unwrap_err();
    assert!(
        matches!(refused, Error::TooManyApprovals { limit: MAX_PENDING_OF_TENANT, .. }),
        "{refused:?}"
    );
    assert!(
        fixture.store.run_get(&fixture.tenant, id).await.unwrap().is_none(),
        "the run was not inserted"
    );
    fixture.end().await;
}

/// Inserts many approvals at once.
async fn fill(fixture: &Fixture, session: SessionId, run: RunId, count: i64, state: &str) {
    let mut connection = fixture.database.connection().await.unwrap();
    sqlx::query(
        "INSERT INTO approvals (id, tenant_id, session_id, run_id, kind, host, port, requested_by, message, state,
                                decided_by, decided_at, expires_at)
         SELECT gen_random_uuid(), 'a', $1, $2, 'egress_host', n || '.test', 443, gen_random_uuid(), 'm', $4,
                CASE WHEN $4 = 'denied' THEN gen_random_uuid() END, CASE WHEN $4 = 'denied' THEN now() END,
                now() + interval '1 hour'
         FROM generate_series(1, $3) AS n",
    )
    .bind(session.0)
    .bind(run.0)
    .bind(count)
    .bind(state)
    .execute(&mut connection)
    .await
    .unwrap();
    connection.close().await.unwrap();
}

#[tokio::test]
async fn events_say_who_decided_and_why() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let new = needed(KeyId::generate(), LONG);
    let run = fixture.hold(session.id, &new).await;
    let decision = allow(ApprovalScope::Session);
    fixture.decided(new.id, &decision).await;
    let revocation = Revocation { key: KeyId::generate(), reason: Some("too wide".into()) };
    fixture.store.approval_revoke(&fixture.tenant, new.id, &revocation).await.unwrap();
    for (kind, key, reason) in [
        (EventKind::ApprovalRequested, new.requested_by, None),
        (EventKind::ApprovalAllowed, decision.key, Some("looks fine")),
        (EventKind::ApprovalRevoked, revocation.key, Some("too wide")),
    ] {
        let events = recorded_events(&fixture.store, &fixture.tenant, Some(kind)).await.unwrap();
        let [event] = events.as_slice() else { panic!("{kind:?}: {events:?}") };
        assert_eq!((event.subject.key, event.subject.run), (Some(key), Some(run)), "{kind:?}");
        assert_eq!(event.body.detail["approval"], new.id.to_string());
        assert_eq!(event.body.detail["reason"].as_str(), reason, "{kind:?}");
    }
    fixture.end().await;
}

#[tokio::test]
async fn changes_are_read_in_order() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let since = fixture.store.database_now().await.unwrap();
    let [first, second] = [(); 2].map(|()| needed(KeyId::generate(), LONG));
    fixture.hold(session.id, &first).await;
    fixture.hold(session.id, &second).await;
    fixture.decided(first.id, &deny()).await;
    let changes = fixture.store.approval_changes(&fixture.tenant, since, 10).await.unwrap();
    let seen: Vec<_> = changes.iter().map(|(_, approval)| (approval.id, approval.state)).collect();
    assert_eq!(seen, [(second.id, ApprovalState::Pending), (first.id, ApprovalState::Denied)]);
    assert!(fixture.store.approval_changes(&fixture.other, since, 10).await.unwrap().is_empty());
    fixture.end().await;
}

#[tokio::test]
async fn old_approvals_are_deleted_but_not_grants() {
    let fixture = Fixture::new().await;
    let (open, closed) = (fixture.session().await, fixture.session().await);
    let mut ids = Vec::new();
    for (session, decision) in [
        (open.id, deny()),
        (open.id, allow(ApprovalScope::Once)),
        (open.id, allow(ApprovalScope::Session)),
        (closed.id, allow(ApprovalScope::Session)),
        (closed.id, allow(ApprovalScope::Tenant)),
    ] {
        // Made long ago, by its id.
        let old =
            uuid::Uuid::from_u128(ApprovalId::generate().0.as_u128() - (DAYS_200_IN_MILLIS << 80));
        let new = NewApproval { id: ApprovalId(old), ..needed(KeyId::generate(), LONG) };
        fixture.hold(session, &new).await;
        fixture.decided(new.id, &decision).await;
        ids.push(new.id);
    }
    let pending = needed(KeyId::generate(), LONG);
    fixture.hold(open.id, &pending).await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(closed.id)).await.unwrap();
    let keep = Retention::default();
    let purged = fixture.store.approval_purge_any_tenant(&keep, 2).await.unwrap();
    assert_eq!(purged, 2, "in batches");
    assert_eq!(fixture.store.approval_purge_any_tenant(&keep, 2).await.unwrap(), 1);
    assert_eq!(fixture.store.approval_purge_any_tenant(&keep, 2).await.unwrap(), 0);
    for (id, is_kept) in ids.iter().zip([false, false, true, false, true]) {
        let found = fixture.store.approval_get(&fixture.tenant, *id).await.unwrap();
        assert_eq!(found.is_some(), is_kept, "{found:?}");
    }
    assert_eq!(fixture.approval(pending.id).await.state, ApprovalState::Pending);
    fixture.end().await;
}
