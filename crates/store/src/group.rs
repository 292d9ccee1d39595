//! Calls that wait at the same moment share one statement.
//!
//! A call that is alone executes a statement of its own at once. Calls that come while that
//! statement is under way wait for it, without a timer, and then go together. A statement for
//! several calls never waits for a locked row and reports nothing but success: a call that it did
//! nothing for executes its own statement afterwards, which waits, refuses and fails as if there
//! were no other calls.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use codelia_telemetry::task;
use codelia_types::TenantId;
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};

use crate::{Error, audit::AuditLog, pools::Pool};

/// Maximum calls of one statement.
const MAX_CALLS: usize = 64;
/// The others wait for the statement of a call that was alone for no longer: it waits for a lock.
const MAX_WAIT: Duration = Duration::from_millis(20);

/// One of the calls that a statement may serve together.
pub(crate) trait GroupCall: Send + Sync + Sized + 'static {
    /// The result of one call.
    type Answer: Send + 'static;

    /// Calls of different tenants take turns.
    fn tenant(&self) -> &TenantId;

    /// Executes one statement. Returns an answer for each call, in order; `None` if the statement
    /// did nothing for it.
    fn execute(
        writer: &Writer,
        calls: &[Self],
    ) -> impl Future<Output = Result<Vec<Option<Self::Answer>>, Error>> + Send;
}

/// The pool and audit log that a statement for several calls is executed with.
#[derive(Debug, Clone)]
pub(crate) struct Writer {
    pub(crate) pool: Pool,
    pub(crate) audit: Arc<AuditLog>,
}

/// The next step of a call.
pub(crate) enum Turn<'a, C: GroupCall> {
    /// Execute a statement of its own. Others wait until this is dropped.
    Alone(#[expect(dead_code, reason = "for its drop")] AloneTurn<'a, C>),
    /// Execute a statement of its own, at the same time as others.
    Own,
    /// Nothing: another statement served the call.
    Answered(C::Answer),
}

/// Calls of one kind.
pub(crate) struct Group<C: GroupCall> {
    state: Mutex<State<C>>,
    alone_ended: Notify,
}

struct State<C: GroupCall> {
    /// The number of the call that executes its own statement, if others wait for it.
    alone: Option<u64>,
    last_alone: u64,
    /// Whether a task executes statements for waiting calls.
    is_draining: bool,
    waiting: Waiting<C>,
}

/// Where the answer of a call goes.
type Answer<C> = oneshot::Sender<Result<Option<<C as GroupCall>::Answer>, Error>>;

struct WaitingCall<C: GroupCall> {
    call: C,
    answer: Answer<C>,
}

/// Waiting calls by tenant.
struct Waiting<C: GroupCall> {
    calls: HashMap<TenantId, VecDeque<WaitingCall<C>>>,
    /// The tenants in `calls`, in the order of their turns.
    order: VecDeque<TenantId>,
}

impl<C: GroupCall> Default for Waiting<C> {
    fn default() -> Self {
        Self { calls: HashMap::new(), order: VecDeque::new() }
    }
}

impl<C: GroupCall> Waiting<C> {
    fn push(&mut self, waiting: WaitingCall<C>) {
        let tenant = waiting.call.tenant();
        if let Some(calls) = self.calls.get_mut(tenant) {
            return calls.push_back(waiting);
        }
        self.order.push_back(tenant.clone());
        self.calls.insert(tenant.clone(), VecDeque::from([waiting]));
    }

    /// The next call of the next tenant.
    fn pop(&mut self) -> Option<WaitingCall<C>> {
        let tenant = self.order.pop_front()?;
        let calls = self.calls.get_mut(&tenant)?;
        let next = calls.pop_front();
        if calls.is_empty() {
            self.calls.remove(&tenant);
        } else {
            self.order.push_back(tenant);
        }
        next
    }
}

impl<C: GroupCall> std::fmt::Debug for Group<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group").finish_non_exhaustive()
    }
}

impl<C: GroupCall> Default for Group<C> {
    fn default() -> Self {
        let state =
            State { alone: None, last_alone: 0, is_draining: false, waiting: Waiting::default() };
        Self { state: Mutex::new(state), alone_ended: Notify::new() }
    }
}

impl<C: GroupCall> Group<C> {
    /// Waits for the turn of a call, and executes it together with others that wait. A call whose
    /// future is dropped while it waits is not executed.
    ///
    /// # Errors
    /// The database could not be reached. The call may have been executed.
    pub(crate) async fn turn(
        self: &Arc<Self>,
        writer: impl FnOnce() -> Writer,
        call: impl FnOnce() -> C,
    ) -> Result<Turn<'_, C>, Error> {
        let answer = {
            let mut state = self.lock();
            if state.alone.is_none() && !state.is_draining {
                state.last_alone += 1;
                let number = state.last_alone;
                state.alone = Some(number);
                return Ok(Turn::Alone(AloneTurn { group: self, number }));
            }
            let (sender, answer) = oneshot::channel();
            state.waiting.push(WaitingCall { call: call(), answer: sender });
            if !std::mem::replace(&mut state.is_draining, true) {
                // In a task: a caller that gives up must not end the statement of the others.
                let drain = Drain { group: self.clone(), has_ended: false };
                task::background("group", drain.run(writer()));
            }
            answer
        };
        match answer.await {
            Ok(Ok(Some(answer))) => Ok(Turn::Answered(answer)),
            Ok(Ok(None)) => Ok(Turn::Own),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(unavailable("the statement was interrupted".to_owned())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The turn of a call that is alone. Its end is the turn of those that wait.
pub(crate) struct AloneTurn<'a, C: GroupCall> {
    group: &'a Group<C>,
    number: u64,
}

impl<C: GroupCall> Drop for AloneTurn<'_, C> {
    fn drop(&mut self) {
        let mut state = self.group.lock();
        if state.alone == Some(self.number) {
            state.alone = None;
            if state.is_draining {
                self.group.alone_ended.notify_one();
            }
        }
    }
}

/// Executes statements for waiting calls until none waits.
struct Drain<C: GroupCall> {
    group: Arc<Group<C>>,
    has_ended: bool,
}

impl<C: GroupCall> Drain<C> {
    async fn run(mut self, writer: Writer) {
        if timeout(MAX_WAIT, self.group.alone_ended.notified()).await.is_err() {
            self.group.lock().alone = None;
        }
        while let Some((calls, answers)) = self.next() {
            let found = C::execute(&writer, &calls).await;
            let mut found = found.map(Vec::into_iter);
            for answer in answers {
                let result = match &mut found {
                    Ok(found) => Ok(found.next().flatten()),
                    Err(error) => copy(error).map_or(Ok(None), Err),
                };
                // The caller may be gone.
                answer.send(result).ok();
            }
        }
    }

    /// The next calls that go together. If there are none, the next call will be alone.
    fn next(&mut self) -> Option<(Vec<C>, Vec<Answer<C>>)> {
        let mut state = self.group.lock();
        let calls = std::iter::from_fn(|| state.waiting.pop());
        let calls: (Vec<_>, Vec<_>) = calls
            .filter(|waiting| !waiting.answer.is_closed())
            .take(MAX_CALLS)
            .map(|waiting| (waiting.call, waiting.answer))
            .unzip();
        self.has_ended = calls.0.is_empty();
        state.is_draining = !self.has_ended;
        (!self.has_ended).then_some(calls)
    }
}

impl<C: GroupCall> Drop for Drain<C> {
    /// After a panic, calls that wait fail.
    fn drop(&mut self) {
        if !self.has_ended {
            let mut state = self.group.lock();
            state.is_draining = false;
            state.waiting = Waiting::default();
        }
    }
}

/// The error for each of several calls; `None` if the database rejected the statement, so that
/// nothing was done and each call can be tried on its own.
fn copy(error: &Error) -> Option<Error> {
    match error {
        Error::PoolExhausted => Some(Error::PoolExhausted),
        Error::Unavailable(source) if !is_rolled_back(source) => {
            Some(unavailable(source.to_string()))
        }
        _ => None,
    }
}

/// Deadlocks and serialization failures.
fn is_rolled_back(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(detail) if detail.code().is_some_and(|code| code.starts_with("40")))
}

fn unavailable(text: String) -> Error {
    Error::Unavailable(io::Error::other(text).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Call(TenantId);

    impl GroupCall for Call {
        type Answer = ();

        fn tenant(&self) -> &TenantId {
            &self.0
        }

        async fn execute(_: &Writer, _: &[Self]) -> Result<Vec<Option<()>>, Error> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn waiting_tenants_take_turns() {
        let mut waiting = Waiting::default();
        for tenant in ["a", "a", "a", "b", "c", "b"] {
            waiting.push(WaitingCall {
                call: Call(tenant.parse().unwrap()),
                answer: oneshot::channel().0,
            });
        }
        let order = std::iter::from_fn(|| waiting.pop());
        let order: Vec<_> = order.map(|waiting| waiting.call.0.to_string()).collect();
        assert_eq!(order, ["a", "b", "c", "a", "b", "a"]);
        assert!(waiting.calls.is_empty() && waiting.order.is_empty());
    }

    #[test]
    fn only_rejected_statements_are_tried_again() {
        assert!(matches!(copy(&Error::PoolExhausted), Some(Error::PoolExhausted)));
        assert!(
            matches!(copy(&unavailable(String::new())), Some(Error::Unavailable(_))),
            "may be done"
        );
        assert!(copy(&Error::Statement(sqlx::Error::RowNotFound)).is_none());
    }
}
